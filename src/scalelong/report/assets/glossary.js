// What the words and symbols mean: on hover, focus and tap, and as a list at the end of the page, which prints.
const GLOSSARY = {
  "held-out loss": "The error of the network on images that it was not trained on, by the averaged weights, with the same noise and times for all methods of a seed. Lower is better. It is the error in the noise ε whatever the network predicts; the dashed line is the same error on images that were trained on. If the two part, the network learns its images by heart.",
  "log-SNR": "The noise level of an image: the logarithm of signal over noise power. Below -6 it is nearly all noise, above 6 nearly all image; the loss differs a hundredfold between them.",
  "steps to the baseline's loss": "The steps after which a method reaches the loss where the baseline ends, divided by the steps that the baseline needs for it. × 0.5 is twice as fast.",
  "Fréchet distance": "How far samples are from real images, in the features of a network. Lower is better; only equal features, numbers of images and samplers can be compared.",
  "precision": "The share of samples that lie among the real images. Noise can have a high precision too: read it with recall and the Fréchet distance.",
  "recall": "The share of real images that lie among the samples.",
  "ms/step": "Milliseconds of one training step, the median.",
  "κ_i": "The coefficient of long skip i: what the skip is multiplied by before the decoder takes it. i = 1 is the outermost, i = N the innermost.",
  "w_i": "The sensitivity of the output to long skip i at the weights of that moment; shown relative to the outermost skip.",
  "RMS": "The root mean square of a feature: its size.",
  "κ kept": "The share of a skip's channels for which a constant κ is not cancelled by the normalisation behind the merge.",
  "collapsed": "The loss went back towards that of a network that knows nothing: its mean since some step is above the level that the run had reached by more than half of what it had learned, and by more than five standard errors.",
  "not learned": "A run that did not collapse and ends above 0.9 of the reference loss: it learned next to nothing, or lost it before the rule could judge.",
  "reference": "The loss of a network that knows nothing: of one that always answers zero, or of the baseline at the start.",
  "left first": "Of the runs that were lost, the block or long skip whose size was the first to change by a factor of two from what it was at the best loss. The trouble shows there first; its cause may lie elsewhere.",
  "none": "The network as it is: no scaling of the long skips, and the start that its configuration says.",
  "cs:0.7": "Constant scaling (CS): long skip i is multiplied by 0.7 to the power i - 1, so that the inner skips are small.",
  "start:cs:0.7": "The same coefficients, multiplied before the first step into the weights that read the skips. Nothing stays attached, and training may change them.",
  "ls": "Learnable scaling (LS): small networks compute the coefficients of the long skips from their features, and are trained along.",
  "merge_norm": "A norm in every merge: features of the main path are normalised where a long skip joins them.",
  "unit gain": "A start in which all residual branches together add about as much as the features have, so that features keep their size through the network. The long skips are not scaled.",
  "diverged": "The loss or the weights became infinite or not a number, and the run was ended.",
  "90 % interval": "Where the mean over seeds lies with 90 % confidence (Student's t), each seed paired with the baseline of the same seed.",
};

const PLACES = [
  [/^held-out loss/, "held-out loss"], [/^log-SNR/, "log-SNR"], [/^steps to /, "steps to the baseline's loss"], [/^κ(_1| survives| kept)?/, "κ_i"], [/^w_i/, "w_i"], [/^RMS/, "RMS"],
];

function meaningOf(name) {
  if (/^κ (survives|kept)/.test(name)) return "κ kept";
  if (name in GLOSSARY) return name;
  return PLACES.find(([pattern]) => pattern.test(name))?.[1] ?? null;
}

// κ_1 and w_i with real subscripts.
function rich(text) {
  const node = html("span");
  for (const part of String(text).replace("...", "…").split(/([κwx]_\w+)/)) {
    const match = /^([κwx])_(\w+)$/.exec(part);
    node.append(...(match ? [match[1], html("sub", {}, match[2])] : [part]));
  }
  return node;
}

const explanation = html("div", { class: "explain", role: "tooltip", id: "explanation", hidden: "" });

function explain(target, text) {
  explanation.textContent = text;
  explanation.hidden = false;
  const place = target.getBoundingClientRect(), size = explanation.getBoundingClientRect();
  const left = Math.max(8, Math.min(place.left, document.documentElement.clientWidth - size.width - 8));
  const below = place.bottom + 6 + size.height < window.innerHeight;
  explanation.style.left = `${left + window.scrollX}px`;
  explanation.style.top = `${(below ? place.bottom + 6 : place.top - size.height - 6) + window.scrollY}px`;
}

function dismiss() { explanation.hidden = true; }

// A word with its explanation, or just the word.
function term(name) {
  const meaning = meaningOf(name);
  if (!meaning) return rich(name);
  const node = html("button", { type: "button", class: "term", "aria-describedby": "explanation" }, rich(name));
  const show = () => explain(node, GLOSSARY[meaning]);
  node.addEventListener("pointerenter", show);
  node.addEventListener("focus", show);
  node.addEventListener("click", (event) => { event.stopPropagation(); show(); });
  node.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") dismiss(); });
  node.addEventListener("blur", dismiss);
  node.addEventListener("keydown", (event) => { if (event.key === "Escape") dismiss(); });
  return node;
}

// The words that stand on this page, once it is drawn.
function drawGlossary(box) {
  document.body.append(explanation);
  document.addEventListener("click", dismiss);
  box.replaceChildren();
  const page = document.querySelector("main").innerText;  // without what is hidden
  const written = { "κ_i": "κ", "steps to the baseline's loss": "steps to ", "90 % interval": "90 %", "w_i": "wi/w1", "reference": "of the reference", "ls": "\\bls\\b", "none": "\\bnone\\b" };
  const used = Object.entries(GLOSSARY).filter(([name]) => page.search(written[name] ?? name) >= 0);
  box.replaceChildren(...used.flatMap(([name, text]) => [html("dt", {}, rich(name)), html("dd", {}, text)]));
  box.closest("section").hidden = !used.length;
}
