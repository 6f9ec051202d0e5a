"use strict";

const OPTIONS = {
  responsive: true,
  displaylogo: false,
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
};

// Layout of all plots; each plot adds its own.
const LAYOUT = JSON.parse(document.getElementById("layout").textContent);

function specification(plot) {
  const { data, layout } = JSON.parse(plot.nextElementSibling.textContent);
  const whole = { ...structuredClone(LAYOUT), ...layout };
  for (const part of ["legend", "xaxis", "yaxis"]) whole[part] = { ...LAYOUT[part], ...layout[part] };
  return plot.dataset.axis ? withChoices(data, whole, plot.dataset.axis) : { data, layout: whole };
}

// Curves of runs: the reader chooses the x-axis, smoothing, and a logarithmic y-axis.

const TITLES = {
  examples: "examples seen",
  step: "steps",
  minutes: "minutes since training began",
  epoch: "epochs",
};
const HOVERS = {
  examples: "after %{x:,.0f} examples",
  step: "after %{x:,.0f} steps",
  minutes: "at minute %{x:.2f}",
  epoch: "at epoch %{x:.2f}",
};
const HOVER = /(after %\{x:,\} (examples|steps)|at minute %\{x:\.2f\})/;
let axes = { choices: [], runs: {} };

function withChoices(data, layout, native) {
  const axis = axes.choices.includes(chosen.axis) ? chosen.axis : axes.choices[0];
  if (axis && axis !== native) {
    for (const trace of data) {
      trace.x = converted(numbers(trace.x), axes.runs[trace.meta.run], native, axis);
      trace.hovertemplate = trace.hovertemplate.replace(HOVER, HOVERS[axis]);
    }
    layout.xaxis = { ...layout.xaxis, title: { text: TITLES[axis] } };
  }
  if (chosen.smoothing > 0) data = data.flatMap(smoothed);
  if (chosen.logarithmic) layout.yaxis = { ...layout.yaxis, type: "log", tickformat: "~g", range: undefined };
  // A zoomed range is that of one axis.
  layout.xaxis = { ...layout.xaxis, uirevision: axis };
  layout.yaxis = { ...layout.yaxis, uirevision: chosen.logarithmic };
  return { data, layout };
}

const ARRAYS = { i4: Int32Array, f4: Float32Array, f8: Float64Array };

function numbers(packed) {
  if (!packed.bdata) return packed;
  const bytes = Uint8Array.from(atob(packed.bdata), (letter) => letter.charCodeAt(0));
  return new ARRAYS[packed.dtype](bytes.buffer);
}

// Place of a value in an increasing array: the first one that is not smaller.
function place(values, value) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

// Interpolates between the moments of a run, and extends the last piece.
function converted(values, moments, from, to) {
  const x = moments[from];
  const y = moments[to];
  return Float64Array.from(values, (value) => {
    const next = Math.min(Math.max(place(x, value), 1), x.length - 1);
    const width = x[next] - x[next - 1];
    const share = width > 0 ? (value - x[next - 1]) / width : 1;
    return y[next - 1] + share * (y[next] - y[next - 1]);
  });
}

// The exponential moving average of a line over the line itself, which becomes faint. Points of
// validation are few, and stay.
function smoothed(trace) {
  if (trace.marker?.symbol === "diamond") return [trace];
  const y = Float64Array.from(numbers(trace.y));
  let sum = 0;
  let weight = 0;
  for (const [index, value] of y.entries()) {
    sum = chosen.smoothing * sum + (1 - chosen.smoothing) * value;
    weight = chosen.smoothing * weight + (1 - chosen.smoothing);
    y[index] = sum / weight;
  }
  const faint = { ...trace, opacity: 0.25, showlegend: false, hoverinfo: "skip" };
  delete faint.hovertemplate;
  return [faint, { ...trace, y }];
}

function redraw() {
  keep();
  for (const plot of document.querySelectorAll(".plot[data-axis][data-drawn]")) {
    delete plot.dataset.drawn;
    draw(plot);
  }
}

document.addEventListener("input", (event) => {
  if (event.target.name === "axis") chosen.axis = event.target.value;
  else if (event.target.id === "smoothing") chosen.smoothing = event.target.valueAsNumber;
  else if (event.target.id === "logarithmic") chosen.logarithmic = event.target.checked;
  else return;
  redraw();
});

function showChoices() {
  const controls = document.getElementById("controls");
  if (!controls) return;
  axes = JSON.parse(document.getElementById("axes").textContent);
  controls.hidden = !document.querySelector(".plot[data-axis]");
  for (const input of controls.querySelectorAll("[name=axis]")) {
    if (input.value === chosen.axis) input.checked = true;
  }
  document.getElementById("smoothing").value = chosen.smoothing;
  document.getElementById("logarithmic").checked = chosen.logarithmic;
}

// The pointer in one plot shows the values of the same run at the same moment in the others.

function followers(plot) {
  return [...document.querySelectorAll(".plot[data-axis][data-drawn]")].filter((other) => {
    const box = other.getBoundingClientRect();
    return other !== plot && box.bottom > 0 && box.top < innerHeight;
  });
}

function follow(plot, event) {
  const { x, data } = event.points[0];
  for (const other of followers(plot)) {
    const points = [];
    for (const [curveNumber, trace] of other._fullData.entries()) {
      const isShown = trace.visible === true && trace.hoverinfo !== "skip";
      if (!isShown || trace.meta?.run !== data.meta?.run || !trace.x.length) continue;
      const next = place(trace.x, x);
      const isBefore = next === trace.x.length || (next && x - trace.x[next - 1] < trace.x[next] - x);
      points.push({ curveNumber, pointNumber: isBefore ? next - 1 : next });
    }
    if (points.length) Plotly.Fx.hover(other, points, "xy", true);
  }
}

// The reader's choices survive a reload, unless the page is in a notebook that forbids storage.
const KEY = "kdist report " + location.pathname;
let chosen = { hidden: [], open: {}, sorted: {}, axis: null, smoothing: 0, logarithmic: false };
try {
  chosen = { ...chosen, ...JSON.parse(sessionStorage.getItem(KEY)) };
} catch {}

function keep() {
  try {
    sessionStorage.setItem(KEY, JSON.stringify(chosen));
  } catch {}
}

// Plots are drawn when they come into view, as drawing hundreds at once would take a minute.

function visibility(trace) {
  return trace.meta && chosen.hidden.includes(trace.meta.run) ? "legendonly" : true;
}

function draw(plot) {
  if (plot.dataset.drawn) return;
  const isNew = !plot.classList.contains("js-plotly-plot");
  const { data, layout } = specification(plot);
  for (const trace of data) if (trace.meta) trace.visible = visibility(trace);
  plot.dataset.drawn = "yes";
  Plotly.react(plot, data, layout, OPTIONS);
  if (!isNew) return;
  if (plot.dataset.axis) {
    plot.on("plotly_hover", (event) => follow(plot, event));
    plot.on("plotly_unhover", () => followers(plot).forEach((other) => Plotly.Fx.unhover(other)));
  }
  // Hides a run in all plots; returning false keeps plotly from doing it in this one.
  plot.on("plotly_legendclick", (event) => {
    const run = event.data[event.curveNumber].meta?.run;
    if (run === undefined) return true;
    show(run, chosen.hidden.includes(run));
    return false;
  });
  plot.on("plotly_legenddoubleclick", (event) => {
    const run = event.data[event.curveNumber].meta?.run;
    if (run === undefined) return true;
    const others = runs().filter((name) => name !== run);
    const isAlone = others.every((name) => chosen.hidden.includes(name));
    hide(isAlone ? [] : others);
    return false;
  });
}

const views = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) if (entry.isIntersecting) draw(entry.target);
  },
  { rootMargin: "400px" },
);

// Hidden and visible runs

function runs() {
  return [...document.querySelectorAll("#picker input")].map((box) => box.value);
}

function show(run, isShown) {
  hide(isShown ? chosen.hidden.filter((name) => name !== run) : [...chosen.hidden, run]);
}

function hide(names) {
  chosen.hidden = names;
  keep();
  tick();
  for (const plot of document.querySelectorAll(".plot[data-drawn]")) {
    const places = [...plot.data.keys()].filter((place) => plot.data[place].meta);
    if (!places.length) continue;
    const visible = places.map((place) => visibility(plot.data[place]));
    Plotly.restyle(plot, { visible }, places);
  }
}

function tick() {
  for (const box of document.querySelectorAll("#picker input")) {
    box.checked = !chosen.hidden.includes(box.value);
  }
}

document.addEventListener("change", (event) => {
  const { value, checked } = event.target;
  if (event.target.closest("#picker")) show(value, checked);
  else if (event.target.closest("#columns")) chooseColumns({ ...columns, [value]: checked });
});
document.addEventListener("click", (event) => {
  const button = event.target.closest("#picker button");
  if (button) hide(button.value === "all" ? [] : runs());
  else if (event.target.closest("#columns button")) chooseColumns({});
});

// Open sections. The event does not bubble.

document.addEventListener(
  "toggle",
  (event) => {
    if (!event.target.id) return;
    chosen.open[event.target.id] = event.target.open;
    keep();
  },
  true,
);

// Tables of several runs are sorted by a column; the values are compared as numbers where they are.

function sortable(table) {
  const headings = [...table.tHead.rows[0].cells];
  const section = table.closest("section").id;
  for (const heading of headings) {
    const name = heading.textContent;
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    button.addEventListener("click", () => {
      chosen.sorted[section] = { name, ascending: heading.ariaSort !== "ascending" };
      keep();
      sort(table, headings, chosen.sorted[section]);
    });
    heading.append(button);
  }
  if (chosen.sorted[section]) sort(table, headings, chosen.sorted[section]);
}

function sort(table, headings, { name, ascending }) {
  const column = headings.findIndex((heading) => heading.textContent === name);
  if (column < 0) return;
  for (const heading of headings) heading.ariaSort = null;
  headings[column].ariaSort = ascending ? "ascending" : "descending";
  const rows = [...table.tBodies[0].rows].sort(
    (one, two) => (ascending ? 1 : -1) * compare(text(one, column), text(two, column)),
  );
  table.tBodies[0].append(...rows);
}

// Columns of the table of runs. The choice also holds for later pages at the same address.

const COLUMNS_KEY = "kdist report columns " + location.pathname;
let columns = {}; // heading: whether it is shown, where the reader has chosen
try {
  columns = JSON.parse(localStorage.getItem(COLUMNS_KEY)) ?? {};
} catch {}

function showColumns() {
  const choice = document.getElementById("columns");
  if (!choice) return;
  choice.hidden = false;
  const rows = [...document.querySelector("#runs table").rows];
  for (const [order, box] of choice.querySelectorAll("input").entries()) {
    box.checked = columns[box.value] ?? box.defaultChecked;
    for (const row of rows) row.cells[order + 1].hidden = !box.checked; // after the names of runs
  }
}

function chooseColumns(choices) {
  columns = choices;
  try {
    localStorage.setItem(COLUMNS_KEY, JSON.stringify(columns));
  } catch {}
  showColumns();
}

function text(row, column) {
  return row.cells[column].textContent;
}

function compare(one, two) {
  const [first, second] = [one, two].map((each) => parseFloat(each.replaceAll(",", "")));
  if (Number.isNaN(first) || Number.isNaN(second)) {
    return Number.isNaN(second) - Number.isNaN(first) || one.localeCompare(two);
  }
  return first - second;
}

function begin() {
  showChoices();
  showColumns();
  for (const table of document.querySelectorAll("table.sortable")) sortable(table);
  for (const [id, isOpen] of Object.entries(chosen.open)) {
    const details = document.getElementById(id);
    if (details) details.open = isOpen;
  }
  tick();
  for (const plot of document.querySelectorAll(".plot")) views.observe(plot);
}

begin();

// Printed pages show all settings and have another width than the window.

addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details.settings")) details.open = true;
  for (const plot of document.querySelectorAll(".plot")) {
    if (!plot.closest("details:not([open])")) draw(plot);
  }
});
matchMedia("print").addEventListener("change", () => {
  for (const plot of document.querySelectorAll(".plot[data-drawn]")) Plotly.Plots.resize(plot);
});
