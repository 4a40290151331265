// Puts the pieces together. All state is here: which methods are shown, and the positions of the sliders.
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const find = (id) => document.getElementById(id);
  const shown = new Set(data.methods);
  const colour = (label) => `var(--m${data.methods.indexOf(label) % 8})`;
  const runsOf = (label) => data.runs.filter((run) => run.label === label);
  const visible = () => data.methods.filter((label) => shown.has(label));
  const line = (run, name) => run.curves[name] ? { x: run.curves[name][0], y: run.curves[name][1] } : null;

  function groups(name) {
    return visible().map((label) => ({ label, colour: colour(label), lines: runsOf(label).map((run) => line(run, name)).filter(Boolean) })).filter((group) => group.lines.length);
  }

  function theme(next) {
    document.documentElement.dataset.theme = next;
    try { localStorage.setItem("scalelong-theme", next); } catch { /* a file opened from disk may have no storage */ }
  }

  function startTheme() {
    let saved = null;
    try { saved = localStorage.getItem("scalelong-theme"); } catch { /* none */ }
    const asked = new URLSearchParams(location.search).get("theme");
    theme(asked || saved || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
    find("theme").addEventListener("click", () => { theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"); draw(); });
  }

  function makeToggles() {
    for (const label of data.methods) {
      const button = html("button", { type: "button", class: "toggle", "aria-pressed": "true", "data-method": label, style: `--c:${colour(label)}` }, html("i"), label);
      button.addEventListener("click", () => {
        if (shown.has(label)) shown.delete(label); else shown.add(label);
        button.setAttribute("aria-pressed", String(shown.has(label)));
        draw();
      });
      find("methods").append(button);
    }
  }

  function drawTables() {
    find("tables").replaceChildren(...data.tables.map((table) => {
      const columns = table.rows.length ? Object.keys(table.rows[0]) : [];
      const head = html("tr", {}, ...columns.map((name) => html("th", { scope: "col" }, name)));
      const body = table.rows.map((row) => {
        const label = data.methods.find((method) => method === row.method || method.startsWith(`${row.method},`)) || row.method;
        return html("tr", { class: shown.has(label) ? "" : "off" }, ...columns.map((name, i) => i ? html("td", {}, row[name]) : html("th", { scope: "row", style: `--c:${colour(label)}` }, html("i"), row[name])));
      });
      return html("div", { class: "card scroll", tabindex: "0", role: "region", "aria-label": table.title, style: "margin-bottom:1rem" }, html("table", {}, html("caption", {}, table.title), html("thead", {}, head), html("tbody", {}, ...body)));
    }));
    for (const run of data.runs) if (run.diverged) find("tables").append(html("p", { class: "warn" }, `${run.label}, seed ${run.seed} diverged. ${run.diverged}`));
  }

  const kappaNames = (run) => Object.keys(run.curves).filter((name) => name.startsWith("kappa/")).sort((a, b) => a.slice(6) - b.slice(6));
  const readingSteps = [...new Set(data.runs.flatMap((run) => kappaNames(run).slice(0, 1).flatMap((name) => run.curves[name][0])))].sort((a, b) => a - b);
  const sampleSteps = [...new Set(data.runs.flatMap((run) => run.samples.map((sample) => sample.step)))].sort((a, b) => a - b);

  // The mean over seeds of κ and RMS of every skip at the reading closest to a step.
  function skipsAt(label, step) {
    const runs = runsOf(label).filter((run) => kappaNames(run).length);
    if (!runs.length) return [];
    const near = (curve) => { let best = 0; curve[0].forEach((s, i) => { if (Math.abs(s - step) < Math.abs(curve[0][best] - step)) best = i; }); return curve[1][best]; };
    const mean = (values) => values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
    return kappaNames(runs[0]).map((name) => ({
      kappa: mean(runs.filter((run) => run.curves[name]).map((run) => near(run.curves[name])).filter((value) => value !== null)) ?? 0,
      rms: mean(runs.filter((run) => run.curves[`probe_skip_rms/${name.slice(6)}`]).map((run) => near(run.curves[`probe_skip_rms/${name.slice(6)}`])).filter((value) => value !== null)),
    }));
  }

  function drawSkips() {
    if (!readingSteps.length) { find("skips").hidden = true; return; }
    const step = readingSteps[find("skip-step").value];
    find("skip-step-out").value = step;
    find("skip-step").setAttribute("aria-valuetext", `step ${step}`);
    const found = visible().map((label) => ({ label, skips: skipsAt(label, step) })).filter((entry) => entry.skips.length);
    const largest = Math.max(1e-12, ...found.flatMap((entry) => entry.skips.map((skip) => skip.kappa * (skip.rms ?? 1))));
    find("maps").replaceChildren(...found.map((entry) => html("div", { class: "card tile", style: `--c:${colour(entry.label)}` },
      html("h3", {}, entry.label, html("small", {}, `${entry.skips.length} long skips`)), drawMap(entry.skips, largest, entry.label))));
    const count = Math.max(1, ...found.map((entry) => entry.skips.length)), x = Array.from({ length: count }, (_, i) => i + 1);
    drawChart(find("coefficients"), {
      title: `Coefficients κ_i at step ${step}, against the band of constant scaling (κ from 0.5 to 0.95)`, xLabel: "long skip i (1 is the outermost)", xName: "skip", integer: true,
      range: [0, Math.max(1.05, ...found.flatMap((entry) => entry.skips.map((skip) => skip.kappa * 1.05)))],
      band: { x, low: x.map((i) => 0.5 ** (i - 1)), high: x.map((i) => 0.95 ** (i - 1)) },
      groups: found.map((entry) => ({ label: entry.label, colour: colour(entry.label), dots: true, lines: [{ x: entry.skips.map((_, i) => i + 1), y: entry.skips.map((skip) => skip.kappa) }] })),
    });
    find("coefficients").append(html("div", { class: "legend" }, html("span", {}, "Colour in the maps: κ = 0 "), html("span", { class: "ramp", role: "img", "aria-label": "from light (0) to strong (1)" }), html("span", {}, "κ = 1")));
  }

  function drawSamples() {
    if (!sampleSteps.length) { find("samples-section").hidden = true; return; }
    const step = sampleSteps[find("sample-step").value], seed = Number(find("sample-seed").value);
    find("sample-step-out").value = step;
    find("sample-step").setAttribute("aria-valuetext", `step ${step}`);
    find("samples").replaceChildren(...visible().flatMap((label) => runsOf(label).filter((run) => run.seed === seed).map((run) => {
      const sample = run.samples.filter((entry) => entry.step <= step).at(-1);
      const picture = sample ? html("img", { src: sample.image, alt: `Samples of ${label} after ${sample.step} steps, seed ${seed}`, "data-step": sample.step }) : html("p", { class: "none" }, "no samples yet");
      return html("div", { class: "card tile", style: `--c:${colour(label)}` }, html("h3", {}, label, html("small", {}, sample ? `step ${sample.step}` : "")), picture);
    })));
  }

  function fillSelectors() {
    const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.curves)))];
    const titles = { "": "Training", gradient_norm: "Gradient norm per block", probe_block_rms: "Feature RMS per block, probe batch", probe_skip_rms: "Feature RMS per skip, probe batch", update_ratio: "Update relative to weight", kappa: "Coefficients κ_i" };
    for (const [prefix, title] of Object.entries(titles)) {
      const mine = names.filter((name) => (name.includes("/") ? name.split("/")[0] : "") === prefix);
      if (mine.length) find("quantity").append(html("optgroup", { label: title }, ...mine.map((name) => html("option", { value: name }, name.includes("/") ? name.slice(prefix.length + 1) : name.replaceAll("_", " ")))));
    }
    const favourite = names.find((name) => name.startsWith("probe_block_rms/decoder") || name.startsWith("probe_block_rms/up")) || names.find((name) => name === "gradient_norm") || names[0];
    if (favourite) find("quantity").value = favourite;
    find("quantity").addEventListener("change", drawExplorer);
    find("log").addEventListener("change", drawExplorer);
    const seeds = [...new Set(data.runs.map((run) => run.seed))].sort((a, b) => a - b);
    find("sample-seed").append(...seeds.map((seed) => html("option", { value: seed }, String(seed))));
    find("seed-label").hidden = seeds.length < 2;
    find("sample-seed").addEventListener("change", drawSamples);
    for (const [id, steps, redraw] of [["skip-step", readingSteps, drawSkips], ["sample-step", sampleSteps, drawSamples]]) {
      find(id).max = Math.max(0, steps.length - 1); find(id).value = Math.max(0, steps.length - 1);
      find(id).addEventListener("input", redraw);
    }
  }

  function drawExplorer() {
    const name = find("quantity").value;
    drawChart(find("explorer"), { title: find("quantity").selectedOptions[0]?.closest("optgroup")?.label.concat(": ", find("quantity").selectedOptions[0].textContent) || name, log: find("log").checked, groups: groups(name) });
  }

  function drawConfigs() {
    find("configs").replaceChildren(...data.runs.map((run) => html("details", { style: `--c:${colour(run.label)}` },
      html("summary", {}, html("i"), `${run.label}, seed ${run.seed}${run.diverged ? " (diverged)" : run.finished ? "" : " (not finished)"}`),
      html("div", {}, html("pre", { tabindex: "0", "aria-label": "configuration" }, run.config), html("pre", { tabindex: "0", "aria-label": "environment and data" }, JSON.stringify({ data: run.data, environment: run.environment }, null, 2))))));
  }

  function drawDiagnosis() {
    if (!data.diagnosis) return;
    find("diagnosis-section").hidden = false;
    const { rows, facts, reasons } = data.diagnosis, columns = Object.keys(rows[0]);
    const table = html("table", {}, html("thead", {}, html("tr", {}, ...columns.map((name) => html("th", { scope: "col" }, name)))),
      html("tbody", {}, ...rows.map((row) => html("tr", {}, ...columns.map((name) => html("td", {}, row[name]))))));
    find("diagnosis").replaceChildren(html("div", { class: "card" },
      html("dl", { class: "facts" }, ...Object.entries(facts).flatMap(([name, value]) => [html("dt", {}, name), html("dd", {}, value)])),
      html("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "long skips at initialisation" }, table),
      html("ul", { class: "hint" }, ...reasons.map((reason) => html("li", {}, reason)))));
  }

  function draw() {
    drawTables();
    drawChart(find("held-out"), { title: "Held-out loss (averaged weights)", log: true, groups: groups("held_out_loss") });
    drawChart(find("train-loss"), { title: "Training loss", log: true, groups: groups("loss") });
    drawSkips(); drawSamples(); drawExplorer();
  }

  startTheme(); makeToggles(); fillSelectors(); drawConfigs(); drawDiagnosis();
  find("version").textContent = data.version;
  const seeds = new Set(data.runs.map((run) => run.seed)).size, steps = Math.max(0, ...data.runs.map((run) => Math.max(0, ...Object.values(run.curves).map((curve) => curve[0].at(-1) || 0))));
  find("lead").textContent = `${data.runs.length} run${data.runs.length === 1 ? "" : "s"}: ${data.methods.join(", ")}; ${seeds} seed${seeds === 1 ? "" : "s"}, up to ${steps} steps. Runs of one seed share initial weights, order of data and noise; they differ in the scaling of the long skips alone.`;
  draw();
  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(draw, 120); });
})();
