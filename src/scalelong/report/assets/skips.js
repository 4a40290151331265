// The network as a U: encoder on the left, decoder on the right, long skips between them.
function mix(a, b, share) {
  const part = (i) => Math.round(parseInt(a.slice(i, i + 2), 16) * (1 - share) + parseInt(b.slice(i, i + 2), 16) * share);
  return `rgb(${part(1)} ${part(3)} ${part(5)})`;
}

function kappaColour(kappa) {
  const style = getComputedStyle(document.documentElement), stop = (name) => style.getPropertyValue(name).trim();
  const share = Math.max(0, Math.min(1, kappa));
  return share < 0.5 ? mix(stop("--k0"), stop("--k1"), share * 2) : mix(stop("--k1"), stop("--k2"), share * 2 - 1);
}

// skips: [{kappa, rms}] outermost first; largest: the largest κ·RMS of all methods, so that widths can be compared.
function drawMap(skips, largest, title) {
  const count = skips.length, width = 328, gap = Math.max(20, Math.min(36, 250 / count)), top = 18, height = top + gap * (count - 1) + 60;
  const left = 62, right = width - 70, bottom = top + gap * (count - 1);
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", width: "100%", "aria-label": `${title}: ${skips.map((skip, i) => `skip ${i + 1}: kappa ${format(skip.kappa)}, RMS ${format(skip.rms)}`).join("; ")}` });
  svg.append(element("path", { d: `M${left} ${top - 12}V${bottom + 12}Q${left} ${bottom + 44} ${left + 46} ${bottom + 44}H${right - 46}Q${right} ${bottom + 44} ${right} ${bottom + 12}V${top - 12}`, fill: "none", stroke: "var(--line)", "stroke-width": 12, "stroke-linecap": "round", "stroke-linejoin": "round" }));
  svg.append(element("text", { x: width / 2, y: bottom + 48, "text-anchor": "middle", class: "strong" }, "middle"));
  skips.forEach((skip, i) => {
    const y = top + gap * i, entering = skip.kappa * (skip.rms ?? 1), thickness = Math.max(1, 15 * Math.sqrt(entering / largest)), colour = kappaColour(skip.kappa);
    const group = element("g", { class: "skip" }, element("title", {}, `long skip ${i + 1}\nκ = ${format(skip.kappa)}\nRMS of the feature: ${format(skip.rms)}\nentering the merge: ${format(entering)}`));
    group.append(element("line", { x1: left, x2: right, y1: y, y2: y, stroke: colour, "stroke-width": thickness, "stroke-linecap": "butt" }),
      element("circle", { cx: left, cy: y, r: 6, fill: "var(--card)", stroke: colour, "stroke-width": 2.5 }), element("circle", { cx: right, cy: y, r: 6, fill: "var(--card)", stroke: colour, "stroke-width": 2.5 }),
      element("text", { x: left - 14, y: y + 4, "text-anchor": "end" }, `i = ${i + 1}`), element("text", { x: right + 14, y: y + 4, class: "strong" }, `κ ${format(Number(skip.kappa.toPrecision(2)))}`));
    svg.append(group);
  });
  return svg;
}
