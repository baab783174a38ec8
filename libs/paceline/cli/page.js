// The live page: puts the server's drawing in place and asks for its state; nothing is computed here.
"use strict";
const [run, state, queues] = ["run", "state", "queues"].map((id) => document.getElementById(id));
let drawn = -1;

async function answer(path) {
  const found = await fetch(path);
  if (!found.ok) throw new Error(found.statusText);
  return found;
}

async function showRun() {
  const text = await (await answer("content")).text();
  const all = () => [...run.querySelectorAll("details")];
  const open = new Set(all().filter((one) => one.open).map((one) => one.innerText.split("\n")[0]));
  const before = all().length;
  run.innerHTML = text;
  if (before) for (const one of all()) one.open = open.has(one.innerText.split("\n")[0]);
}

function showFigures(figures) {
  queues.replaceChildren(...Object.entries(figures).map(([name, value]) => {
    const one = document.createElement("span"), figure = document.createElement("b");
    figure.textContent = value;
    one.append(`${name.replaceAll("_", " ")} `, figure);
    return one;
  }));
}

async function showState(now) {
  const slots = Object.entries(now.slots).map(([slot, holder]) => `slot ${slot}: ${holder}`);
  const away = now.away.length ? [`away: ${now.away.join(", ")}`] : [];
  const steps = `step ${now.complete} of ${now.total_steps}`;
  state.textContent = [steps, now.failure || now.phase, ...slots, ...away].join("  ·  ");
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
