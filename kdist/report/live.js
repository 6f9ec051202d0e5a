"use strict";

// Asks who serves the page whether there are new figures, and puts them in place: the reader's place
// in the page, what is zoomed, hidden and unfolded stays.

const SECONDS_BETWEEN_LOOKS = 1;
const stateOfPage = document.createElement("p");
stateOfPage.id = "live";
stateOfPage.setAttribute("role", "status");
document.body.prepend(stateOfPage);

function say(text) {
  if (stateOfPage.textContent !== text) stateOfPage.textContent = text;
}

async function look() {
  try {
    const answer = await fetch("state", { cache: "no-store" });
    const state = await answer.json();
    if (state.version !== document.documentElement.dataset.version) await renew();
    say(state.error ? `Not renewed: ${state.error}` : `Live. Renewed at ${state.time}`);
  } catch {
    say("The program that serves this page has ended, or the page is cut off from it.");
  }
  setTimeout(look, 1000 * SECONDS_BETWEEN_LOOKS);
}

async function renew() {
  const text = await (await fetch(location.pathname, { cache: "no-store" })).text();
  const next = new DOMParser().parseFromString(text, "text/html");
  const place = scrollY;
  const focus = document.activeElement?.id;
  const main = document.importNode(next.querySelector("main"), true);
  // Drawn plots move over, so that plotly only changes what is new in them.
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

look();
