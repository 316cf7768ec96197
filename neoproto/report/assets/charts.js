// Panels: one card each, drawn when it comes near the window, redrawn when a control changes.

const VIEW = { time: false, smoothing: 0, hidden: new Set() };
const CARDS = [];

function xs(run, axis) {
  const steps = DATA.axes[axis];
  if (!VIEW.time) return steps;
  const clock = run.clock || (run.clock = new Map(run.times[0].map((step, index) => [step, run.times[1][index]])));
  return steps.map((step) => (clock.get(step) === undefined || clock.get(step) === null ? null : clock.get(step) / 60));
}

// Exponential moving average, corrected for its start; gaps stay gaps.
function smoothed(values, weight) {
  let sum = 0;
  let mass = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}

function faded(colour, alpha) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return `rgba(${red},${green},${blue},${alpha})`;
}

function lineTraces(card) {
  const panel = card.panel;
  const several = DATA.runs.length > 1;
  const shades = DATA.runs.length - VIEW.hidden.size <= 3; // of more runs, shades hide each other
  const traces = [];
  for (const curve of panel.curves) {
    if (VIEW.hidden.has(curve.run) || card.off.has(curve.line)) continue;
    const run = DATA.runs[curve.run];
    const line = panel.lines[curve.line];
    const colour = colourOf(several ? curve.run : curve.line);
    const style = { color: colour, width: 1.8, dash: several ? DASHES[curve.line % DASHES.length] : "solid" };
    const x = xs(run, curve.axis);
    if (curve.band && curve.band.length === 2 && shades) {
      const edge = { mode: "lines", line: { width: 0 }, hoverinfo: "skip" };
      traces.push({ ...edge, x: xs(run, curve.band[0].axis), y: curve.band[0].y });
      traces.push({ ...edge, x: xs(run, curve.band[1].axis), y: curve.band[1].y, fill: "tonexty", fillcolor: faded(colour, several ? 0.09 : 0.14) });
    }
    const smooth = VIEW.smoothing > 0 && !line.markers;
    if (smooth) traces.push({ x, y: curve.y, mode: "lines", line: { color: faded(colour, 0.3), width: 1 }, hoverinfo: "skip" });
    const dots = line.markers || x.length < 4;
    traces.push({
      x,
      y: smooth ? smoothed(curve.y, VIEW.smoothing) : curve.y,
      name: plain(several ? `${run.name}${panel.lines.length > 1 ? `: ${line.label}` : ""}` : line.label),
      mode: dots ? "lines+markers" : "lines",
      line: style,
      marker: { color: colour, size: 6 },
    });
  }
  return traces;
}

// The parts of a step, those that take longest first, and the whole of it.
function phasesOf(panel, curves) {
  const total = (curve) => curve.y.reduce((sum, value) => sum + (value || 0), 0);
  const whole = curves.filter((curve) => panel.lines[curve.line].label === "step");
  const parts = curves.filter((curve) => !whole.includes(curve)).sort((a, b) => total(b) - total(a));
  return { parts, whole };
}

function stackedTraces(card, run) {
  const panel = card.panel;
  const { parts, whole } = phasesOf(panel, panel.curves.filter((curve) => curve.run === run && !card.off.has(curve.line)));
  const traces = parts.map((curve) => {
    const colour = colourOf(curve.line - 1);
    const common = { x: xs(DATA.runs[run], curve.axis), y: curve.y, name: plain(panel.lines[curve.line].label) };
    return curve.y.length <= 200 && !VIEW.time
      ? { ...common, type: "bar", marker: { color: faded(colour, 0.85) } }
      : { ...common, mode: "lines", stackgroup: "phases", line: { width: 0.5, color: colour }, fillcolor: faded(colour, 0.75) };
  });
  for (const curve of whole) {
    traces.push({ x: xs(DATA.runs[run], curve.axis), y: curve.y, name: "whole step", mode: "lines", line: { color: theme("--ink"), width: 1.5 } });
  }
  return traces;
}

// What the lines of a chart are. Beside the chart and not in it, where it would take the room of the curves. With several
// runs colours are the runs' (see the bar above), and the legend says what the dashes are.
function legendOf(card) {
  const { panel } = card;
  const drawn = new Set(panel.curves.map((curve) => curve.line));
  let shown = panel.lines.map((_, index) => index).filter((index) => drawn.has(index));
  if (panel.stacked) {
    const { parts, whole } = phasesOf(panel, panel.curves.filter((curve) => curve.run === card.runs[0]));
    const first = [...parts, ...whole].map((curve) => curve.line);
    shown = [...first, ...shown.filter((line) => !first.includes(line))];
  }
  if (shown.length < 2) return null;
  return el("div", { class: "legend" }, shown.map((index) => {
    const line = panel.lines[index];
    const part = panel.stacked && line.label !== "step";
    const button = el("button", { type: "button", "aria-pressed": "true", title: `${line.metric}: show or hide`, onclick: () => {
      if (!card.off.delete(index)) card.off.add(index);
      button.setAttribute("aria-pressed", String(!card.off.has(index)));
      draw(card);
    } }, swatch(card, index, part), panel.stacked && !part ? "whole step" : line.label);
    return button;
  }));
}

function swatch(card, index, part) {
  const several = DATA.runs.length > 1;
  const ink = card.panel.stacked || several ? "var(--soft)" : `var(${colourName(index)})`;
  if (part) return svg("svg", { width: 10, height: 10 }, svg("rect", { width: 10, height: 10, rx: 2, style: `fill: var(${colourName(index - 1)})` }));
  const dash = several && !card.panel.stacked ? DASH_LENGTHS[index % DASH_LENGTHS.length] : "none";
  const node = svg("svg", { width: 24, height: 10 }, svg("line", { x1: 0, y1: 5, x2: 24, y2: 5, "stroke-width": 2, "stroke-dasharray": dash, style: `stroke: ${ink}` }));
  if (card.panel.lines[index].markers) node.append(svg("circle", { cx: 12, cy: 5, r: 3.2, style: `fill: ${ink}` }));
  return node;
}

// 1, 2 and 5 in each decade where there are few of these, else powers of ten.
function logTicks(traces) {
  const values = traces.flatMap((trace) => trace.y).filter((value) => value > 0);
  if (!values.length) return { tickmode: "auto" };
  let low = Infinity;
  let high = 0;
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  const first = Math.floor(Math.log10(low));
  const decades = Math.ceil(Math.log10(high)) - first;
  const stride = Math.ceil(decades / 6);
  const ticks = [];
  for (let power = first - 1; power <= first + decades + 1; power += 1) {
    if (decades <= 2) ticks.push(...[1, 2, 5].map((digit) => Number(`${digit}e${power}`)));
    else if ((power - first) % stride === 0) ticks.push(Number(`1e${power}`));
  }
  return { tickmode: "array", tickvals: ticks, ticktext: ticks.map((tick) => (tick >= 1e-3 && tick < 1e5 ? String(tick) : tick.toExponential(0))) };
}

function layout(panel, log, traces) {
  const axis = { gridcolor: theme("--grid"), zerolinecolor: theme("--zero"), automargin: true, tickfont: { size: 11, color: theme("--soft") } };
  return {
    margin: { l: 52, r: 10, t: 12, b: 34 },
    modebar: { bgcolor: theme("--card"), color: theme("--soft"), activecolor: theme("--accent") },
    font: { family: "system-ui, -apple-system, Segoe UI, Roboto, DejaVu Sans, sans-serif", size: 12, color: theme("--soft") },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    hovermode: "x unified", hoverlabel: { font: { size: 12, color: theme("--ink") }, namelength: 40, bgcolor: theme("--card"), bordercolor: theme("--field-line") },
    showlegend: false,
    barmode: "stack", bargap: 0.12,
    xaxis: { ...axis, title: { text: VIEW.time ? "minutes since the first line" : "step", font: { size: 11 }, standoff: 4 } },
    yaxis: { ...axis, ...(log ? logTicks(traces) : { tickmode: "auto" }), title: { text: plain(panel.unit), font: { size: 11 }, standoff: 6 }, type: log ? "log" : "linear",
      hoverformat: ".4~g", exponentformat: "power", rangemode: panel.stacked ? "tozero" : "normal" },
    uirevision: VIEW.time ? "time" : "step",
  };
}

const PLOT_OPTIONS = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };

function draw(card) {
  card.drawn = true;
  if (!card.panel.stacked) {
    const traces = lineTraces(card);
    Plotly.react(card.plots[0], traces, layout(card.panel, card.log, traces), PLOT_OPTIONS);
    return;
  }
  card.plots.forEach((plot, index) => {
    const run = card.runs[index];
    plot.parentNode.classList.toggle("hidden", VIEW.hidden.has(run));
    if (VIEW.hidden.has(run)) return;
    const traces = stackedTraces(card, run);
    const shape = layout(card.panel, card.log, traces);
    if (card.most && !card.log) shape.yaxis.range = [0, card.most];
    Plotly.react(plot, traces, shape, PLOT_OPTIONS);
  });
}

function redraw() {
  for (const card of CARDS) if (card.drawn) draw(card);
}

// The same height for all runs of a stacked panel, so that they can be compared.
function tallest(panel) {
  const sums = new Map();
  for (const curve of panel.curves) {
    if (panel.lines[curve.line].label === "step") continue;
    const steps = DATA.axes[curve.axis];
    curve.y.forEach((value, index) => {
      const key = `${curve.run} ${steps[index]}`;
      sums.set(key, (sums.get(key) || 0) + (value || 0));
    });
  }
  const sorted = [...sums.values()].sort((a, b) => a - b);
  // One slow step (the first, often) must not flatten all the others.
  return sorted.length ? Math.min(sorted[sorted.length - 1], 2 * sorted[Math.floor(sorted.length * 0.9)]) * 1.06 : 0;
}

function panelCard(panel) {
  const card = { panel, log: panel.log, drawn: false, runs: [0], plots: [], off: new Set(), asked: false };
  const logButton = el("button", { class: "plain", type: "button", title: "logarithmic axis", "aria-pressed": String(card.log),
    onclick: () => { card.log = !card.log; logButton.setAttribute("aria-pressed", String(card.log)); draw(card); } }, "log");
  const wideButton = el("button", { class: "plain", type: "button", title: "over the whole width", "aria-pressed": "false",
    onclick: () => {
      const wide = card.node.classList.toggle("wide");
      wideButton.setAttribute("aria-pressed", String(wide));
      card.plots.forEach((plot) => Plotly.Plots.resize(plot));
    } }, "wide");
  card.node = el("section", { class: "card", id: `panel-${panel.key}`, "data-find": `${panel.title} ${panel.lines.map((line) => line.metric).join(" ")}`.toLowerCase() },
    el("div", { class: "head" }, el("h3", {}, panel.title), panel.stacked ? null : logButton, panel.stacked ? null : wideButton),
    el("div", { class: "help" }, panel.help));
  if (panel.stacked) {
    card.node.classList.add("wide");
    card.runs = [...new Set(panel.curves.map((curve) => curve.run))];
    card.most = DATA.runs.length > 1 ? tallest(panel) : 0;
  }
  const plots = el("div", { class: "plots" });
  for (const run of card.runs) {
    const plot = el("div", { class: "plot" });
    card.plots.push(plot);
    const name = panel.stacked && DATA.runs.length > 1 ? el("div", { class: "small" }, runDot(run), " ", DATA.runs[run].name) : null;
    plots.append(el("div", {}, name, plot));
  }
  card.node.append(...[legendOf(card), plots].filter(Boolean));
  card.node.classList.toggle("zero", Boolean(panel.zero));
  CARDS.push(card);
  return card.node;
}

const runDot = (run) => el("span", { class: "dot", style: { background: `var(${colourName(run)})` } });

// Panels that are 0 throughout, by their names: one click draws them.
function zeros(panels) {
  const quiet = panels.filter((panel) => panel.zero);
  if (!quiet.length) return null;
  return el("div", { class: "zeros" }, "0 throughout:", quiet.map((panel) => {
    const button = el("button", { class: "plain", type: "button", title: "draw it", onclick: () => {
      const card = CARDS.find((one) => one.panel === panel);
      card.asked = true;
      card.node.classList.remove("zero");
      button.remove();
      draw(card);
    } }, panel.title);
    return button;
  }));
}

// Any metric by name, also those that have no panel.
function explorerCard() {
  const names = Object.keys(DATA.metrics);
  if (!names.length) return null;
  const panel = { key: "any", title: "Any metric", unit: "value", help: "", stacked: false, log: false, lines: [], curves: [] };
  const select = options(el("select", { id: "any-metric", "aria-label": "metric" }), names.map((name) => [name, name]));
  const choose = () => {
    panel.lines = [{ label: select.value, markers: false, metric: select.value }];
    panel.curves = DATA.metrics[select.value].flatMap((curve, run) => (curve ? [{ run, line: 0, ...curve }] : []));
    const card = CARDS.find((one) => one.panel === panel);
    if (card.drawn) draw(card);
  };
  const node = panelCard(panel);
  node.classList.add("wide");
  select.addEventListener("change", choose);
  node.querySelector(".help").append(select);
  choose();
  return node;
}

function watchCards() {
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const card = CARDS.find((one) => one.node === entry.target);
      if (entry.isIntersecting && !card.drawn) draw(card);
    }
  }, { rootMargin: "600px" });
  for (const card of CARDS) watcher.observe(card.node);
  DARK.addEventListener("change", redraw);
  window.addEventListener("beforeprint", () => CARDS.filter((card) => !card.node.classList.contains("zero")).forEach(draw));
}
