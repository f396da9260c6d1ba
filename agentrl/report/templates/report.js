"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);

  // Builds elements from text only: no string is ever parsed as markup.
  function el(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
    return node;
  }

  function number(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (value !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
    return String(Number(value.toPrecision(size >= 1000 ? 6 : 3)));
  }

  // Charts: one crosshair for all of them.

  const charts = [...document.querySelectorAll(".chart")].map((figure) => {
    const svg = figure.querySelector("svg");
    const frame = Object.fromEntries(["left", "right", "low", "high"].map((name) => [name, Number(svg.dataset[name])]));
    return { svg, frame, cross: svg.querySelector(".cross"), outputs: figure.querySelectorAll("output"), lines: data.charts[Number(figure.dataset.chart)] };
  });

  function nearest(points, step) {
    let low = 0, high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] <= step) low = middle; else high = middle;
    }
    return Math.abs(points[low][0] - step) <= Math.abs(points[high][0] - step) ? points[low] : points[high];
  }

  const reading = document.getElementById("reading");

  function showStep(step) {
    if (reading) reading.textContent = step === null ? "" : `step ${step}`;
    for (const chart of charts) {
      const { left, right, low, high } = chart.frame;
      const inside = step !== null && step >= low && step <= high;
      chart.cross.classList.toggle("on", inside);
      if (inside) for (const end of ["x1", "x2"]) chart.cross.setAttribute(end, left + (step - low) / (high - low) * (right - left));
      chart.lines.forEach((line, index) => {
        const point = step === null ? line.points[line.points.length - 1] : nearest(line.points, step);
        chart.outputs[index].textContent = number(point[1]);
      });
    }
  }

  for (const chart of charts) {
    chart.svg.addEventListener("pointermove", (event) => {
      const box = chart.svg.getBoundingClientRect();
      const { left, right, low, high } = chart.frame;
      const x = (event.clientX - box.left) / box.width * chart.svg.viewBox.baseVal.width;
      showStep(Math.round(Math.min(Math.max(low + (x - left) / (right - left) * (high - low), low), high)));
    });
    chart.svg.addEventListener("pointerleave", () => showStep(null));
  }
  showStep(null);

  // Episodes.

  const list = document.getElementById("list");
  if (!list) return;
  const detail = document.getElementById("detail");
  const tip = document.getElementById("tip");
  const state = { outcome: "all", pick: "any", current: 0, tab: "messages", byProbability: false };

  const outcomeOf = (episode) =>
    episode.ending === "failed" ? "infra" : episode.passed ? "solved" : episode.ending === "truncated" ? "truncated" : "failed";
  const OUTCOMES = {
    all: () => true,
    solved: (episode) => episode.passed === true,
    failed: (episode) => episode.passed === false,
    truncated: (episode) => episode.ending === "truncated",
    infra: (episode) => episode.ending === "failed",
  };
  const PICKS = ["any", "first step", "last step", "top reward", "lowest reward", "held-out", "side effect", "stopped", "random"];
  const picked = (name) => (episode) => name === "any" || episode.tags.includes(name);

  function visible() {
    return data.episodes.filter((episode) => OUTCOMES[state.outcome](episode) && picked(state.pick)(episode));
  }

  function chip(kind, name, test) {
    const count = data.episodes.filter(test).length;
    const choose = () => { state[kind] = name; state.current = data.episodes.indexOf(visible()[0]); render(); };
    return el("button", { class: "chip", "aria-pressed": String(state[kind] === name), disabled: count ? null : "", onclick: choose },
      name, el("small", {}, String(count)));
  }

  function renderFilters() {
    document.getElementById("filters").replaceChildren(
      ...Object.keys(OUTCOMES).map((name) => chip("outcome", name, (episode) => OUTCOMES[name](episode) && picked(state.pick)(episode))),
      el("span", { class: "gap" }),
      ...PICKS.map((name) => chip("pick", name, (episode) => OUTCOMES[state.outcome](episode) && picked(name)(episode))),
    );
  }

  function renderList() {
    const scroll = list.scrollTop;
    list.replaceChildren(...visible().map((episode) => {
      const index = data.episodes.indexOf(episode);
      return el("button", { class: "item", "aria-current": String(index === state.current), onclick: () => { state.current = index; render(); } },
        el("i", { class: "mark " + outcomeOf(episode), title: outcomeOf(episode) }),
        el("b", {}, String(episode.key.task)),
        el("span", { class: "reward" }, episode.reward === null ? "–" : number(episode.reward)),
        el("small", {}, `step ${episode.key.round} · ${episode.end.replaceAll("_", " ")} · ${episode.counts.turns} turns`));
    }));
    list.scrollTop = scroll;
  }

  function pairs(entries) {
    return el("div", { class: "pairs" }, ...entries.map(([name, value]) => el("span", {}, name + " ", el("b", {}, String(value)))));
  }

  function renderDetail() {
    const episode = data.episodes[state.current];
    if (!episode) return detail.replaceChildren("No episode fits these filters.");
    const { key, counts } = episode;
    const outcome = { solved: "solved", failed: "not solved", truncated: "cut short, not solved", infra: "lost to infrastructure, no score" };
    const parts = Object.entries(episode.parts);
    detail.replaceChildren(...[
      el("h3", {}, el("i", { class: "mark " + outcomeOf(episode) }), " " + key.task, " ", el("span", { class: "note" }, outcome[outcomeOf(episode)])),
      pairs([["reward", episode.reward === null ? "none" : number(episode.reward)], ["ending", episode.end.replaceAll("_", " ")],
        ["step", key.round], ["sample", key.sample], ["attempt", key.attempt], ["run", key.run]]),
      pairs([["turns", counts.turns], ["tool calls", counts.tool_calls], ["tool errors", counts.tool_errors], ["unreadable calls", counts.bad_calls],
        ["sampled tokens", counts.sampled_tokens], ["seconds", number(counts.wall_s)]]),
      parts.length > 0 && el("div", { class: "parts" }, "score parts", pairs(parts)),
      episode.why && el("p", { class: "why" }, episode.why),
      el("div", { class: "tabs", role: "tablist" }, tab("messages", "Messages"), tab("tokens", "Tokens")),
      state.tab === "tokens" ? tokenView(episode) : messageView(episode),
    ].filter(Boolean));
  }

  function tab(name, label) {
    return el("button", { class: "tab", role: "tab", "aria-selected": String(state.tab === name), onclick: () => { state.tab = name; renderDetail(); } }, label);
  }

  // The conversation.

  function callView(call) {
    if (call.bad !== undefined) {
      return el("div", { class: "call" }, el("span", { class: "bad" }, "unreadable call: " + call.why), "\n" + call.bad);
    }
    let rows = [["", call.arguments]];
    try { rows = Object.entries(JSON.parse(call.arguments)); } catch { /* clipped: shown as it stands */ }
    return el("div", { class: "call" }, el("b", {}, call.name),
      ...rows.map(([name, value]) => el("div", { class: "argument" }, el("span", {}, name),
        el("div", {}, typeof value === "string" ? value : JSON.stringify(value)))));
  }

  function messageView(episode) {
    const box = el("div", {}, ...episode.messages.map((message) =>
      el("div", { class: "message " + message.role + (message.error ? " error" : "") },
        el("div", { class: "who" }, message.role + (message.name ? " · " + message.name : "") + (message.error ? " · error" : "")),
        message.reasoning ? el("details", {}, el("summary", {}, "reasoning"), el("pre", {}, message.reasoning)) : null,
        el("div", { class: "body" }, message.content || (message.calls ? "" : "(empty)"), ...(message.calls || []).map(callView)))));
    if (episode.messages_cut) box.append(el("p", { class: "cut" }, `${episode.messages_cut} more messages are not shown.`));
    for (const [name, text] of Object.entries(episode.artifacts)) {
      box.append(el("details", {}, el("summary", {}, "artifact " + name), el("pre", {}, text)));
    }
    for (const row of safetyView(episode)) box.append(row);
    const effects = episode.side_effects && Object.entries(episode.side_effects);
    if (!effects) box.append(el("p", {}, "Side effects: not measured."));
    else if (!effects.length) box.append(el("p", {}, "Side effects: none."));
    else box.append(el("details", { open: "" }, el("summary", {}, `side effects (${effects.length})`), pairs(effects)));
    return box;
  }

  // What a guard decided, and text that was injected.

  function safetyView(episode) {
    const rows = [], attack = episode.injection;
    if (attack) {
      const end = attack.reached ? "reached" : attack.exposed ? "seen, not reached" : "not seen";
      rows.push(el("details", {}, el("summary", {}, `injected text, goal ${attack.goal}: ${end}`), el("pre", {}, attack.payload)));
    }
    if (!episode.events.length) return rows;
    const cells = episode.events.map((event) => el("tr", { class: event.verdict },
      ...[`${event.turn}.${event.index}`, event.tool, event.effect, event.verdict, event.rule || "(none)", event.taint.join(", "), event.by].map((text) => el("td", {}, text))));
    const head = ["turn.call", "tool", "effect", "decision", "rule", "text that came from", "asked"].map((text) => el("th", {}, text));
    const stopped = episode.events.filter((event) => event.verdict !== "allow").length;
    rows.push(el("details", { open: stopped ? "" : false }, el("summary", {}, `decisions of the safety policy (${episode.events.length}, ${stopped} not simply allowed)`),
      el("div", { class: "scroll" }, el("table", { class: "decisions" }, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...cells)))));
    if (episode.events_cut) rows.push(el("p", { class: "cut" }, `${episode.events_cut} more decisions are not shown.`));
    return rows;
  }

  // The tokens: colour says who wrote them, underline says whether they train.

  const KINDS = { p: "prompt", s: "sampled", o: "observation" };

  function textOf(id) {
    const text = data.vocab[id];
    return text === undefined ? null : text;
  }

  function visibleText(id) {
    const text = textOf(id);
    if (text === null) return [String(id) + " "];
    if (text === "") return [el("span", { class: "control" }, "∅")];
    return text.split(/(\n)/).flatMap((part) => part === "\n" ? [el("span", { class: "control" }, "↵"), "\n"] : part === "" ? [] : [part]);
  }

  function branchView(episode, branch, number) {
    const rows = [];
    let position = 0, turn = -1;
    branch.segments.forEach((index, place) => {
      const segment = episode.segments[index];
      const sampled = segment.kind === "s";
      const trained = sampled && place >= branch.shared;
      if (sampled) turn += 1;
      const label = [`${segment.ids.length} tokens`];
      if (sampled) label.push(`version ${segment.version}`, segment.finish === "length" ? "cut at limit" : "stopped");
      if (place < branch.shared) label.push("shared");
      const tokens = segment.ids.map((id, offset) => {
        const token = el("span", { class: `t ${segment.kind}${sampled ? (trained ? " on" : " off") : ""}` }, ...visibleText(id));
        if (sampled) token.style.setProperty("--surprise", String(Math.min(1, -segment.logprobs[offset] / 3)));
        token.info = { id, position: position + offset, turn: sampled ? turn + 1 : null, kind: KINDS[segment.kind], trained,
          logprob: sampled ? segment.logprobs[offset] : null, version: sampled ? segment.version : null };
        return token;
      });
      position += segment.ids.length;
      rows.push(el("div", { class: "segment" }, el("div", { class: "label" },
        el("b", {}, sampled ? `turn ${turn + 1}` : KINDS[segment.kind]), ...label.map((line) => el("span", {}, line))), el("div", { class: "tokens" }, ...tokens)));
    });
    const head = episode.branches.length > 1 &&
      el("div", { class: "branch-head" }, `Branch ${number + 1}` + (branch.shared ? `: its first ${branch.shared} segments belong to an earlier branch and train there` : ""));
    return el("div", {}, head, ...rows);
  }

  function sample(kind, text) {
    return el("span", {}, el("span", { class: "sample t " + kind }, "token"), " " + text);
  }

  function tokenView(episode) {
    if (!episode.branches.length) return el("p", { class: "cut" }, "This policy speaks messages, so there are no tokens.");
    const toggle = el("button", { class: "chip", "aria-pressed": String(state.byProbability), onclick: () => { state.byProbability = !state.byProbability; renderDetail(); } },
      "shade by surprise");
    const box = el("div", { class: state.byProbability ? "by-probability" : "" },
      el("div", { class: "key-row" }, sample("s on", "sampled, trained"), sample("s off", "sampled, context here"), sample("o", "observation"), sample("p", "prompt"), toggle),
      ...episode.branches.map((branch, index) => branchView(episode, branch, index)));
    if (episode.tokens_cut) box.append(el("p", { class: "cut" }, `${episode.tokens_cut} more tokens are not shown.`));
    return box;
  }

  function showTip(token) {
    detail.querySelectorAll(".picked").forEach((node) => node.classList.remove("picked"));
    if (!token) { tip.hidden = true; return; }
    token.classList.add("picked");
    const info = token.info;
    const text = textOf(info.id);
    const rows = [["id", info.id], ["position", info.position], ["written by", info.kind === "sampled" ? `policy, version ${info.version}` : info.kind],
      ["trained", info.trained ? "yes" : "no"]];
    if (info.logprob !== null) rows.push(["turn", info.turn], ["logprob", info.logprob.toFixed(4)], ["probability", Math.exp(info.logprob).toFixed(4)]);
    tip.replaceChildren(el("div", { class: "text" }, text === null ? "(no text: no tokenizer)" : JSON.stringify(text)),
      el("dl", {}, ...rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))])));
    tip.hidden = false;
    const box = token.getClientRects()[0];
    const left = Math.min(box.left, window.innerWidth - tip.offsetWidth - 8);
    const below = box.bottom + 6;
    tip.style.left = Math.max(8, left) + "px";
    tip.style.top = (below + tip.offsetHeight > window.innerHeight ? box.top - tip.offsetHeight - 6 : below) + "px";
  }

  const tokenAt = (event) => { const token = event.target.closest(".t"); return token && token.info ? token : null; };
  detail.addEventListener("pointerover", (event) => showTip(tokenAt(event)));
  detail.addEventListener("pointerleave", () => showTip(null));
  window.addEventListener("scroll", () => showTip(null), { passive: true });

  list.addEventListener("keydown", (event) => {
    const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const rows = visible();
    const next = rows[rows.indexOf(data.episodes[state.current]) + move];
    if (next) { state.current = data.episodes.indexOf(next); render(); list.querySelector("[aria-current=true]").focus(); }
  });

  function render() {
    showTip(null);
    renderFilters();
    renderList();
    renderDetail();
  }

  // A link may name what to show: report.html#episode=3&tab=tokens
  const asked = new URLSearchParams(window.location.hash.slice(1));
  if (asked.get("tab") === "tokens") state.tab = "tokens";
  const wanted = Number(asked.get("episode") || 0);
  if (wanted >= 0 && wanted < data.episodes.length) state.current = Math.floor(wanted);
  render();
})();
