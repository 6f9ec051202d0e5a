"use strict";

// Polls the server for new measurements and updates the page. The scroll position, zoomed plots,
// hidden runs, and open sections stay as they are.

const SECONDS_BETWEEN_POLLS = 1;
const pageStatus = document.createElement("p");
pageStatus.id = "live";
pageStatus.setAttribute("role", "status");
document.body.prepend(pageStatus);

function setStatus(text) {
  if (pageStatus.textContent !== text) pageStatus.textContent = text;
}

async function poll() {
  try {
    const answer = await fetch("state", { cache: "no-store" });
    const state = await answer.json();
    if (state.version !== document.documentElement.dataset.version) await update();
    setStatus(state.error ? `Not updated: ${state.error}` : `Live. Updated at ${state.time}`);
  } catch {
    setStatus("No connection to the program that serves this page. It may have ended.");
  }
  setTimeout(poll, 1000 * SECONDS_BETWEEN_POLLS);
}

async function update() {
  const text = await (await fetch(location.pathname, { cache: "no-store" })).text();
  const next = new DOMParser().parseFromString(text, "text/html");
  const place = scrollY;
  const focus = document.activeElement?.id;
  const main = document.importNode(next.querySelector("main"), true);
  // Drawn plots are moved to the new page, so that plotly only draws changes.
  for (const plot of document.querySelectorAll(".plot[data-drawn]")) {
    const successor = main.querySelector(`#${CSS.escape(plot.id)}`);
    if (!successor) {
      Plotly.purge(plot);
      continue;
    }
    plot.ariaLabel = successor.ariaLabel;
    plot.style.height = successor.style.height;
    delete plot.dataset.drawn;
    successor.replaceWith(plot);
  }
  views.disconnect();
  document.querySelector("main").replaceWith(main);
  document.title = next.title;
  document.documentElement.dataset.version = next.documentElement.dataset.version;
  begin();
  if (focus) document.getElementById(focus)?.focus({ preventScroll: true });
  scrollTo(scrollX, place);
}

poll();
