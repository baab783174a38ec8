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

  // All bars of a holder are one path, in which the one under the pointer is looked up.
  function bar(svg, path, event) {
    const [left, seconds, height] = svg.dataset.scale.split(" ").map(Number);
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    for (const [, x, y, width] of path.getAttribute("d").matchAll(/M([\d.]+) (\d+)h([\d.]+)/g)) {
      if (at.y < +y || at.y > +y + height || at.x < x - 0.1 || at.x > +x + +width + 0.1) continue;
      const row = svg.querySelectorAll("text[text-anchor=end]")[Math.floor(y / height)].textContent;
      const digits = Math.max(0, Math.min(3, Math.ceil(-Math.log10(seconds))));
      const [from, took] = [(x - left) * seconds, width * seconds].map((one) => one.toFixed(digits));
      return `${row}: ${titled(path)}\nfrom ${from} s on, for ${took} s`;
    }
    return titled(path);
  }

  function show(event) {
    const one = event.target;
    const timeline = one instanceof SVGPathElement && one.closest("svg[data-scale]");
    const said = !(one instanceof Element) ? "" : timeline && titled(one) ? bar(timeline, one, event) : titled(one);
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
