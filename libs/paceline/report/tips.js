// Shows the value under the pointer, or where a finger taps. Without it a browser shows the titles to a pointer by itself.
"use strict";
(() => {
  const tip = document.createElement("div"), titles = new WeakMap();
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);

  // A title is taken off its element when it is shown here, or the browser would show it too.
  function titled(one) {
    const inner = one.querySelector(":scope > title");
    const said = inner ? inner.textContent : one.getAttribute("title");
    if (!said) return titles.get(one) ?? "";
    titles.set(one, said);
    if (inner) inner.remove();
    else one.removeAttribute("title");
    return said;
  }

  function show(event) {
    let said = "";
    for (let one = event.target; !said && one instanceof Element; one = one.parentElement) said = titled(one);
    tip.hidden = !said;
    tip.textContent = said;
    const { width, height } = tip.getBoundingClientRect(), above = event.clientY - height - 14;
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 4))}px`;
    tip.style.top = `${above > 4 ? above : event.clientY + 18}px`;
  }

  const hide = () => { tip.hidden = true; };
  addEventListener("pointermove", show);
  addEventListener("pointerdown", show);
  addEventListener("scroll", hide, true);
  document.documentElement.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
})();
