// The live page: what the server renders is put in place; nothing is computed here.
"use strict";
const run = document.getElementById("run"), state = document.getElementById("state");

async function show() {
  const answer = await fetch("content");
  if (answer.ok) run.innerHTML = await answer.text();
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
news.onerror = () => { state.textContent = "the page's server is away; asking again"; };
