// The live page: puts the server's drawing in place and asks for its state; nothing is computed here.
"use strict";
const [run, state, queues, waiting] = ["run", "state", "queues", "waits"].map((id) => document.getElementById(id));
let drawn = -1, complete = -1;

async function answer(path) {
  const found = await fetch(path);
  if (!found.ok) throw new Error(found.statusText);
  return found;
}

async function showRun() {
  const text = await (await answer("content")).text();
  const title = (one) => one.querySelector("summary").textContent;
  const shut = new Set([...run.querySelectorAll("details:not([open])")].map(title));
  run.innerHTML = text;
  for (const one of run.querySelectorAll("details")) one.open = !shut.has(title(one));
}

function showFigures({ waits, ...figures }) {
  if (!complete && waits) waiting.textContent = `No step has ended yet: ${waits[0]}`;
  queues.replaceChildren(...Object.entries(figures).map(([name, [value, meaning]]) => {
    const one = document.createElement("span"), figure = document.createElement("b");
    figure.textContent = value;
    one.title = meaning;
    one.append(`${name.replaceAll("_", " ")} `, figure);
    return one;
  }));
}

async function showState(now) {
  const slots = Object.entries(now.slots).map(([slot, holder]) => `slot ${slot}: ${holder}`);
  const away = now.away.length ? [`away: ${now.away.join(", ")}`] : [];
  const steps = `step ${now.complete} of ${now.total_steps}`;
  state.textContent = [steps, now.failure || now.phase, ...slots, ...away].join("  ·  ");
  complete = now.complete;
  if (complete) waiting.textContent = "";
  if (now.drawings !== drawn) await showRun();
  drawn = now.drawings;
}

async function poll(path, rest_ms, show) {
  for (;;) {
    try {
      await show(await (await answer(path)).json());
    } catch {
      state.textContent = "the page's server does not answer; asking again";
    }
    await new Promise((done) => setTimeout(done, rest_ms));
  }
}

poll("state", 500, showState);
poll("figures", 2000, showFigures);
