// What is not a curve: final figures, differences, topology, configuration.

function section(id, title, ...children) {
  return el("section", { id, "data-title": title.replace(/ of the .*/, "") }, el("h2", {}, title), children);
}

function headline(run) {
  const wanted = run.wanted_steps ? ` of ${run.wanted_steps}` : "";
  return run.complete ? `complete, ${run.last_step} steps` : `not complete: step ${run.last_step}${wanted}`;
}

function notes() {
  return DATA.runs.flatMap((run) => run.notes.map((note) =>
    el("div", { class: "note" }, DATA.runs.length > 1 ? `${run.name}: ${note}` : note)));
}

function overview() {
  const box = section("overview", "Overview", notes());
  if (DATA.runs.length === 1) {
    box.append(el("div", { class: "tiles" }, DATA.figures.map((row) => el("div", { class: "tile" },
      el("span", { class: "name" }, cuttable(row.name)), el("b", {}, figure(row, 0), row.unit && row.unit !== "s" ? el("span", { class: "unit" }, ` ${row.unit}`) : null)))));
    return box;
  }
  const rows = DATA.figures.map((row) => el("tr", {},
    el("td", {}, cuttable(row.name), row.unit && row.unit !== "s" ? el("span", { class: "unit" }, ` ${row.unit}`) : null),
    row.values.map((_, run) => el("td", { class: "num" }, runDot(run), figure(row, run)))));
  box.append(el("div", { class: "card" }, runTable("", rows, true)));
  return box;
}

// From the first value to the last, and the best where it is another.
function figure(row, run) {
  const value = row.values[run];
  if (!row.first || value === null) return number(value, row.unit);
  const best = row.best[run];
  return [el("span", { class: "from" }, `${share(row.first[run])} → `), share(value),
    best > value ? el("span", { class: "unit" }, ` best ${share(best)}`) : null];
}

// A column for each run; in a narrow window each run's value has the run's dot before it.
function runTable(first, rows, numeric) {
  const heads = [first, ...DATA.runs.map((run, index) => [runDot(index), ` ${run.name}`])];
  const box = table(heads, rows, (column) => numeric && column > 0);
  box.classList.add("runs");
  return box;
}

function differencesSection() {
  if (DATA.runs.length < 2) return null;
  if (!DATA.differences.length) return section("differences", "Differences of the configurations", el("div", { class: "soft" }, "None."));
  const rows = DATA.differences.map((row) => el("tr", {}, el("td", { class: "mono" }, row.key),
    row.values.map((value, run) => el("td", { class: "value mono" }, runDot(run), value))));
  return section("differences", "Differences of the configurations", el("div", { class: "card" }, runTable("key", rows, false)));
}

const MODEL_COLOURS = { actor: 0, rollout: 1, critic: 2, reward: 3, reference: 4 };

function topologyOf(run) {
  const topology = run.topology;
  if (topology.problem) return el("div", { class: "note" }, topology.problem);
  const roles = new Map(topology.rows.map((row) => [row.model, row.role]));
  const clusters = topology.clusters.map((cluster) => el("div", {},
    el("div", {}, el("b", {}, cluster.name), el("span", { class: "soft" }, `  ${cluster.nodes.length} node${cluster.nodes.length > 1 ? "s" : ""}${cluster.kind ? `, ${cluster.kind}` : ""}`)),
    cluster.nodes.map((devices, node) => el("div", { class: "node" }, el("span", { class: "name" }, `node ${node}`),
      devices.map((models, device) => el("div", { class: "device" }, el("span", { class: "soft" }, `device ${device}`),
        models.length ? models.map((model) => el("span", { class: "model", style: { background: `var(${colourName(MODEL_COLOURS[roles.get(model)] ?? 7)})` } }, model))
          : el("span", { class: "model none" }, "unused")))))));
  const heads = Object.keys(topology.rows[0] || {});
  const rows = topology.rows.map((row) => el("tr", {}, heads.map((name) => el("td", { class: name === "ranks" ? "num" : null }, row[name]))));
  return el("div", { class: "card" }, el("div", { class: "soft" }, `trainer.mode: ${topology.mode}`), clusters,
    table(heads, rows, (column) => heads[column] === "ranks"));
}

// The same topology is shown once.
function topologySection() {
  const groups = new Map();
  DATA.runs.forEach((run, index) => {
    const key = JSON.stringify(run.topology);
    groups.set(key, [...(groups.get(key) || []), index]);
  });
  return section("topology", "Topology", [...groups.values()].map((runs) => el("div", { style: { marginBottom: "12px" } },
    DATA.runs.length > 1 ? el("div", { class: "small" }, runs.flatMap((run) => [runDot(run), ` ${DATA.runs[run].name}  `])) : null,
    topologyOf(DATA.runs[runs[0]]))));
}

function tree(config, prefix, differing) {
  return Object.entries(config).map(([key, value]) => {
    const path = prefix ? `${prefix}.${key}` : key;
    if (value !== null && typeof value === "object" && Object.keys(value).length) {
      return el("details", { class: "tree", open: !prefix && Object.keys(config).length < 4 }, el("summary", {}, key), tree(value, path, differing));
    }
    const shown = value !== null && typeof value === "object" ? "{}" : String(value);
    return el("div", { class: `leaf mono${differing.has(path) ? " differs" : ""}`, "data-path": `${path}: ${shown}`.toLowerCase(), title: path },
      el("span", { class: "key" }, key), ": ", el("span", {}, shown));
  });
}

function filterTree(node, wanted) {
  let found = 0;
  for (const child of node.children) {
    if (child.matches("details.tree")) {
      const inside = filterTree(child, wanted);
      child.classList.toggle("hidden", !inside);
      if (wanted) child.open = inside > 0;
      found += inside;
    } else if (child.matches(".leaf")) {
      const hit = child.dataset.path.includes(wanted);
      child.classList.toggle("hidden", !hit);
      found += hit ? 1 : 0;
    }
  }
  return found;
}

function configSection() {
  const differing = new Set(DATA.differences.map((row) => row.key));
  const find = el("input", { type: "search", id: "config-text", placeholder: "key or value", "aria-label": "find in the configuration" });
  const count = el("span", { class: "soft" });
  const run = options(el("select", { "aria-label": "run" }), DATA.runs.map((one, index) => [index, one.name]));
  const box = el("div", { class: "card" });
  const fold = (open) => box.querySelectorAll("details").forEach((one) => { one.open = open; });
  const search = () => {
    const hits = filterTree(box, find.value.trim().toLowerCase());
    count.textContent = find.value.trim() ? `${hits} found` : "";
  };
  const show = () => { box.replaceChildren(...tree(DATA.runs[Number(run.value)].config, "", differing)); search(); };
  run.addEventListener("input", show);
  find.addEventListener("input", search);
  show();
  return section("config", "Configuration",
    el("div", { class: "controls" }, find, DATA.runs.length > 1 ? el("label", {}, "run", run) : null,
      el("button", { class: "plain", type: "button", onclick: () => fold(true) }, "unfold all"),
      el("button", { class: "plain", type: "button", onclick: () => fold(false) }, "fold all"), count),
    box);
}
