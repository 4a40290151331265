/* A search for --budget is one for budget: to the search engine, a dash before a word means "without it". */
for (const kind of new Set([window.Worker, window.IFrameWorker])) {
  const send = kind.prototype.postMessage
  kind.prototype.postMessage = function (message, ...rest) {
    if (message && typeof message.data === "string")
      message = { ...message, data: message.data.replace(/(^|\s)[-+]+(?=\S)/g, "$1") }
    return send.call(this, message, ...rest)
  }
}
