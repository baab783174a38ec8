// The live page: what the server renders is put in place; nothing is computed here.
"use strict";
const [run, state, queues] = ["run", "state", "queues"].map((id) => document.getElementById(id));

async function show() {
  const answer = await fetch("content");
  if (!answer.ok) return;
  const opened = () => [...run.querySelectorAll("details")];
  const open = new Set(opened().filter((one) => one.open).map((one) => one.innerText.split("\n")[0]));
  const before = opened().length;
  run.innerHTML = await answer.text();
  if (before) for (const one of opened()) one.open = open.has(one.innerText.split("\n")[0]);
}

function waits(event) {
  queues.replaceChildren(...Object.entries(JSON.parse(event.data)).map(([name, value]) => {
    const one = document.createElement("span"), figure = document.createElement("b");
    figure.textContent = value;
    one.append(figure, ` ${name}`);
    return one;
  }));
}

function told(event) {
  const now = JSON.parse(event.data);
  const slots = Object.entries(now.slots).map(([slot, holder]) => `slot ${slot}: ${holder}`);
  const away = now.away.length ? [`away: ${now.away.join(", ")}`] : [];
  const steps = `step ${now.complete} of ${now.total_steps}`;
  state.textContent = [steps, now.failure || now.phase, ...slots, ...away].join("  ·  ");
}

const news = new EventSource("events");
news.addEventListener("content", show);
news.addEventListener("state", told);
news.addEventListener("queues", waits);
news.onerror = () => { state.textContent = "the page's server is away; asking again"; };
