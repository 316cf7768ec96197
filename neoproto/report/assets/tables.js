// What is not a curve: final figures, differences, topology, configuration.

function section(id, title, ...children) {
  return el("section", { id, "data-title": title }, el("h2", {}, title), children);
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
    const tiles = DATA.figures.map((row) => el("div", { class: "tile" },
      el("b", {}, number(row.values[0], row.unit), row.unit && row.unit !== "s" ? el("span", { class: "unit" }, ` ${row.unit}`) : null),
      el("span", {}, row.name)));
    box.append(el("div", { class: "tiles" }, tiles));
    return box;
  }
  const heads = ["", ...DATA.runs.map((run) => run.name), "unit"];
  const state = el("tr", {}, el("td", {}, "State"), DATA.runs.map((run) => el("td", { class: "num" }, headline(run))), el("td"));
  const rows = DATA.figures.map((row) => el("tr", {}, el("td", {}, row.name),
    row.values.map((value) => el("td", { class: "num" }, number(value, row.unit))), el("td", { class: "soft" }, row.unit === "s" ? "" : row.unit)));
  box.append(el("div", { class: "card" }, table(heads, [state, ...rows], (column) => column > 0 && column < heads.length - 1)));
  return box;
}

function differencesSection() {
  if (DATA.runs.length < 2) return null;
  if (!DATA.differences.length) return section("differences", "Differences of the configurations", el("div", { class: "soft" }, "None."));
  const rows = DATA.differences.map((row) => el("tr", {}, el("td", { class: "mono" }, row.key), row.values.map((value) => el("td", { class: "text mono" }, value))));
  return section("differences", "Differences of the configurations",
    el("div", { class: "card" }, table(["key", ...DATA.runs.map((run) => run.name)], rows)));
}

const MODEL_COLOURS = { actor: "#2563eb", rollout: "#e07b00", critic: "#15803d", reference: "#7c3aed", reward: "#b3266e" };

function topologyOf(run) {
  const topology = run.topology;
  if (topology.problem) return el("div", { class: "note" }, topology.problem);
  const roles = new Map(topology.rows.map((row) => [row.model, row.role]));
  const clusters = topology.clusters.map((cluster) => el("div", {},
    el("div", {}, el("b", {}, cluster.name), el("span", { class: "soft" }, `  ${cluster.nodes.length} node${cluster.nodes.length > 1 ? "s" : ""}${cluster.kind ? `, ${cluster.kind}` : ""}`)),
    cluster.nodes.map((devices, node) => el("div", { class: "node" }, el("span", { class: "name" }, `node ${node}`),
      devices.map((models, device) => el("div", { class: "device" }, el("span", { class: "soft" }, `device ${device}`),
        models.length ? models.map((model) => el("span", { class: "model", style: { background: MODEL_COLOURS[roles.get(model)] || "#64748b" } }, model))
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
