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
  return { data, layout: whole };
}

// The reader's choices survive a reload, unless the page is in a notebook that forbids storage.
const KEY = "kdist report " + location.pathname;
let chosen = { hidden: [], open: {} };
try {
  chosen = JSON.parse(sessionStorage.getItem(KEY)) ?? chosen;
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
  if (event.target.closest("#picker")) show(event.target.value, event.target.checked);
});
document.addEventListener("click", (event) => {
  const button = event.target.closest("#picker button");
  if (button) hide(button.value === "all" ? [] : runs());
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

function begin() {
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
