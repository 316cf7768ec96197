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

function lineTraces(panel) {
  const several = DATA.runs.length > 1;
  const shades = DATA.runs.length - VIEW.hidden.size <= 3; // of more runs, shades hide each other
  const traces = [];
  const named = new Set();
  for (const curve of panel.curves) {
    if (VIEW.hidden.has(curve.run)) continue;
    const run = DATA.runs[curve.run];
    const line = panel.lines[curve.line];
    const colour = several ? runColour(curve.run) : LINE_COLOURS[curve.line % LINE_COLOURS.length];
    const style = { color: colour, width: 1.8, dash: several ? DASHES[curve.line % DASHES.length] : "solid" };
    const x = xs(run, curve.axis);
    if (curve.band && curve.band.length === 2 && shades) {
      const edge = { mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false };
      traces.push({ ...edge, x: xs(run, curve.band[0].axis), y: curve.band[0].y });
      traces.push({ ...edge, x: xs(run, curve.band[1].axis), y: curve.band[1].y, fill: "tonexty", fillcolor: faded(colour, several ? 0.07 : 0.12) });
    }
    const smooth = VIEW.smoothing > 0 && !line.markers;
    if (smooth) {
      traces.push({ x, y: curve.y, mode: "lines", line: { color: faded(colour, 0.25), width: 1 }, hoverinfo: "skip", showlegend: false });
    }
    const dots = line.markers || x.length < 4;
    traces.push({
      x,
      y: smooth ? smoothed(curve.y, VIEW.smoothing) : curve.y,
      name: plain(several ? `${run.name}${panel.lines.length > 1 ? `: ${line.label}` : ""}` : line.label),
      mode: dots ? "lines+markers" : "lines",
      line: style,
      marker: { color: colour, size: 6, symbol: several ? curve.line % 8 : 0 },
      showlegend: !several && panel.lines.length > 1,
    });
    named.add(curve.line);
  }
  // With several runs colours are the runs' (see the bar above), and the legend says what the dashes are.
  if (several && panel.lines.length > 1) {
    for (const index of [...named].sort((a, b) => a - b)) {
      const style = { color: "#52606d", width: 1.8, dash: DASHES[index % DASHES.length] };
      traces.push({ x: [null], y: [null], mode: panel.lines[index].markers ? "lines+markers" : "lines", line: style,
        marker: { color: "#52606d", size: 6, symbol: index % 8 }, name: plain(panel.lines[index].label), hoverinfo: "skip" });
    }
  }
  return traces;
}

function stackedTraces(panel, run) {
  const curves = panel.curves.filter((curve) => curve.run === run);
  const total = (curve) => curve.y.reduce((sum, value) => sum + (value || 0), 0);
  const whole = curves.filter((curve) => panel.lines[curve.line].label === "step");
  const parts = curves.filter((curve) => !whole.includes(curve)).sort((a, b) => total(b) - total(a));
  const traces = parts.map((curve) => {
    const colour = LINE_COLOURS[(curve.line - 1) % LINE_COLOURS.length];
    const common = { x: xs(DATA.runs[run], curve.axis), y: curve.y, name: plain(panel.lines[curve.line].label) };
    return curve.y.length <= 200 && !VIEW.time
      ? { ...common, type: "bar", marker: { color: faded(colour, 0.85) } }
      : { ...common, mode: "lines", stackgroup: "phases", line: { width: 0.5, color: colour }, fillcolor: faded(colour, 0.75) };
  });
  for (const curve of whole) {
    traces.push({ x: xs(DATA.runs[run], curve.axis), y: curve.y, name: "whole step", mode: "lines", line: { color: "#1f2933", width: 1.5 } });
  }
  return traces;
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
  const legend = traces.filter((trace) => trace.showlegend !== false && trace.name !== undefined).length > 1;
  const axis = { gridcolor: "#eceff3", zerolinecolor: "#cbd2d9", automargin: true, tickfont: { size: 11 } };
  return {
    margin: { l: 52, r: 10, t: 24, b: 34 },
    modebar: { bgcolor: "rgba(255,255,255,0)", color: "#aab4be", activecolor: "#2563eb" },
    font: { family: "system-ui, -apple-system, Segoe UI, Roboto, DejaVu Sans, sans-serif", size: 12, color: "#1f2933" },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    hovermode: "x unified", hoverlabel: { font: { size: 12 }, namelength: 40 },
    showlegend: legend, legend: { orientation: "h", traceorder: "normal", x: 0, y: -0.3, yanchor: "top", font: { size: 11 } },
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
    const traces = lineTraces(card.panel);
    Plotly.react(card.plots[0], traces, layout(card.panel, card.log, traces), PLOT_OPTIONS);
    return;
  }
  card.plots.forEach((plot, index) => {
    const run = card.runs[index];
    plot.parentNode.classList.toggle("hidden", VIEW.hidden.has(run));
    if (VIEW.hidden.has(run)) return;
    const traces = stackedTraces(card.panel, run);
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
  const card = { panel, log: panel.log, drawn: false, runs: [0], plots: [] };
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
  card.node.append(plots);
  CARDS.push(card);
  return card.node;
}

const runDot = (run) => el("span", { class: "dot", style: { background: runColour(run) } });

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
  window.addEventListener("beforeprint", () => CARDS.forEach((card) => draw(card)));
}
