// Puts the page together.

function header() {
  const runs = DATA.runs;
  const top = document.getElementById("top");
  const several = runs.length > 1;
  top.append(el("h1", {}, several ? `${runs.length} runs` : DATA.title), el("div", { class: "small soft" }, `written ${DATA.written}`));
  runs.forEach((run, index) => top.append(el("div", { class: "run" }, several ? [runDot(index), el("b", {}, run.name)] : null,
    el("span", { class: `badge${run.complete ? "" : " open"}` }, headline(run)), el("span", { class: "soft" }, run.folder))));
}

function controlBar() {
  const bar = document.getElementById("bar");
  const links = [...document.querySelectorAll("main > section")].map((one) => el("a", { href: `#${one.id}` }, one.dataset.title));
  const axis = options(el("select", { id: "x-axis" }), [["step", "step"], ["time", "wall time"]]);
  axis.addEventListener("input", () => { VIEW.time = axis.value === "time"; redraw(); });
  const smooth = el("input", { type: "range", id: "smoothing", min: 0, max: 0.98, step: 0.02, value: 0 });
  smooth.addEventListener("input", () => { VIEW.smoothing = Number(smooth.value); redraw(); });
  const find = el("input", { type: "search", id: "panel-text", placeholder: "find a panel", "aria-label": "find a panel" });
  find.addEventListener("input", () => {
    const wanted = find.value.trim().toLowerCase();
    for (const card of CARDS) card.node.classList.toggle("hidden", !card.node.dataset.find.includes(wanted));
    for (const box of document.querySelectorAll("section.charts")) box.classList.toggle("hidden", !box.querySelector(".card:not(.hidden)"));
    // What a person looks for is drawn, also if it is 0 throughout.
    for (const card of CARDS) card.node.classList.toggle("zero", Boolean(card.panel.zero) && !card.asked && !wanted);
  });
  const controls = [el("label", {}, "x", axis), el("label", {}, "smoothing", smooth), find];
  bar.append(el("div", { class: "row" }, links), el("div", { class: "row" }, controls, DATA.runs.length > 1 ? runChips() : null));
}

function runChips() {
  return DATA.runs.map((run, index) => {
    const chip = el("button", { class: "chip", type: "button", "aria-pressed": "true", title: run.folder, onclick: () => {
      if (!VIEW.hidden.delete(index)) VIEW.hidden.add(index);
      chip.setAttribute("aria-pressed", String(!VIEW.hidden.has(index)));
      redraw();
    } }, runDot(index), run.name);
    return chip;
  });
}

function chartSections() {
  const titles = [...new Set(DATA.panels.map((panel) => panel.section))];
  return titles.map((title) => {
    const panels = DATA.panels.filter((panel) => panel.section === title);
    const box = section(title.toLowerCase().replace(/[^a-z]+/g, "-"), title, el("div", { class: "grid" }, panels.map(panelCard)), zeros(panels));
    box.classList.add("charts");
    return box;
  });
}

function build() {
  const main = document.getElementById("main");
  header();
  const explorer = explorerCard();
  const parts = [overview(), differencesSection(), ...chartSections(),
    explorer ? section("any", "Any metric", el("div", { class: "grid" }, explorer)) : null,
    samplesSection(), topologySection(), configSection()];
  main.replaceChildren(...parts.filter(Boolean));
  controlBar();
  watchCards();
  document.documentElement.dataset.ready = "true";
}

build();
