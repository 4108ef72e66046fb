/** The report as one page that needs nothing else: no script, no network. */
import {
  type Coverage,
  CoverageError,
  type Exploration,
  type Level,
  type PairedStatement,
  type UnexploredPair,
} from "holdfast/testing";
import { describe } from "../describe.ts";
import { draw, placeOf } from "./draw.ts";
import { type Outcome, kindOf, meanings, replayCommand, summary } from "./outcome.ts";
import { style } from "./style.ts";
import { escape } from "./text.ts";

export function htmlReport(file: string, outcomes: readonly Outcome[], left: number): string {
  const well = outcomes.every(({ status }) => status === "ok");
  return `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>${well ? "✓" : "✗"} ${escape(file)}: races</title>
<style>${style}</style>
</head>
<body>
<main>
<header>
<h1>Races in <code>${escape(file)}</code></h1>
<p class="${well ? "ok" : "race"}">${escape(summary(outcomes, left))}</p>
</header>
${outcomes.length > 1 ? contents(outcomes) : ""}
${outcomes.map((outcome, i) => section(file, outcome, i)).join("\n")}
</main>
</body>
</html>
`;
}

const verdicts: Readonly<Record<Outcome["status"], string>> = {
  ok: "✓ no race found",
  race: "✗ race",
  error: "! could not run",
};

const badge = ({ status }: Outcome) => `<span class="badge ${status}">${verdicts[status]}</span>`;

function contents(outcomes: readonly Outcome[]): string {
  const items = outcomes.map(
    (outcome, i) => `<li><a href="#s${i}">${escape(outcome.name)}</a> ${badge(outcome)}</li>`,
  );
  return `<nav aria-label="Scenarios"><ul>${items.join("")}</ul></nav>`;
}

function section(file: string, outcome: Outcome, i: number): string {
  const body =
    outcome.status === "error"
      ? `<pre class="error">${escape(describe(outcome.error))}</pre>
${outcome.error instanceof CoverageError ? pairList(outcome.error.unexplored) : ""}`
      : outcome.status === "ok"
        ? passed(outcome.report)
        : failed(outcome.report, replayCommand(file, outcome) ?? "", `s${i}`);
  return `<section id="s${i}" aria-labelledby="s${i}-name">
<h2 id="s${i}-name">${escape(outcome.name)} ${badge(outcome)}</h2>
${body}
</section>`;
}

const count = (n: number, what: string) => `${n} ${what}${n === 1 ? "" : what.endsWith("h") ? "es" : "s"}`;
const seconds = (ms: number) => `${(ms / 1000).toFixed(1)} s`;

function facts(all: Readonly<Record<string, string>>): string {
  const items = Object.entries(all).map(
    ([term, text]) => `<div><dt>${escape(term)}</dt><dd>${escape(text)}</dd></div>`,
  );
  return `<dl>${items.join("")}</dl>`;
}

function passed({ runs, ms, coverage, levels, seed, unexplored }: Exploration): string {
  return `${facts({ Coverage: coverageText(coverage), Runs: String(runs), Time: seconds(ms) })}
${levelTable(levels, seed)}
${pairList(unexplored)}`;
}

function pairList(pairs: readonly UnexploredPair[]): string {
  if (pairs.length === 0) return "";
  const statement = ({ actor, statement: text, place }: PairedStatement) =>
    `<td><strong>${escape(actor)}</strong> <code>${escape(text)}</code>${place === undefined ? "" : `<br><small>${escape(placeOf(place))}</small>`}</td>`;
  const rows = pairs.map(
    ({ table, statements }) =>
      `<tr><th scope="row">${escape(table ?? "any table")}</th>${statements.map(statement).join("")}</tr>`,
  );
  return `<details><summary>${count(pairs.length, "pair")} of statements never interleaved</summary><div class="scroll"><table><tbody>${rows.join("")}</tbody></table></div></details>`;
}

function coverageText(coverage: Coverage): string {
  if (coverage === "exhaustive") return "every order";
  if ("bounded" in coverage) return `every order with up to ${count(coverage.bounded, "switch")}`;
  if ("pairs" in coverage)
    return `every order of each two with up to ${count(coverage.pairs, "switch")}, the others after them`;
  return "as many orders as there was time for";
}

function levelTable(levels: readonly Level[], seed: number): string {
  const [first] = levels;
  // One alone says no more than what stands above it.
  const plain = levels.length === 1 && !first?.isolation && first?.random === 0 && doubts(first).length === 0;
  if (!first || plain) return "";
  const rows = levels.map((level) => {
    const { isolation, coverage, runs, random } = level;
    const notes = [...(random > 0 ? [`${random} of them at random (seed ${seed})`] : []), ...doubts(level)];
    const what = [coverageText(coverage), ...notes].join("; ");
    return `<tr><th scope="row">${escape(levelName(isolation))}</th><td>${runs}</td><td>${escape(what)}</td></tr>`;
  });
  return `<div class="scroll"><table><caption>Nothing found</caption><thead><tr><th scope="col">Isolation</th><th scope="col">Runs</th><th scope="col">Tried</th></tr></thead><tbody>${rows.join("")}</tbody></table></div>`;
}

/** Why it is not known to be everything. */
const doubts = ({ slept, patient, unseen }: Level) => [
  ...(slept.length > 0 ? [`${slept.join(", ")} waited for something that is not a statement`] : []),
  ...(patient.length > 0 ? [`${patient.join(", ")} tried again what was refused`] : []),
  ...unseen.map((text) => `others cannot come into “${text}”`),
];

const levelName = (isolation: string | undefined) => isolation?.toUpperCase() ?? "the transactions’ own";

function failed(report: Exploration, command: string, id: string): string {
  const { anomaly = "race", fix = "", replay = "", runs, ms, preemptions = 0 } = report;
  return `<p class="kind"><strong>${escape(kindOf(report))}.</strong> ${escape(meanings[anomaly] ?? "")}</p>
<pre class="error">${escape(describe(report.error))}</pre>
${facts({
  Found: `in run ${runs}, with ${count(preemptions, "switch")}`,
  Isolation: levelName(report.isolation),
  Time: seconds(ms),
})}
${schedule(report, id)}
<h3>What to do</h3>
<p>${escape(fix)}</p>
<h3>Run this order again</h3>
<p><code class="copy">${escape(command)}</code></p>
<p>In a test: <code class="copy">replay: &quot;${escape(replay)}&quot;</code></p>
${levelTable(report.levels, report.seed)}
<details><summary>As text</summary><div class="scroll" tabindex="0" role="region" aria-label="Schedule as text"><pre>${escape(report.text)}</pre></div></details>`;
}

/** Drawn twice, since text in a picture does not wrap by itself; a page shows the one that fits. */
function schedule({ name, turns = [], actors = [] }: Exploration, id: string): string {
  const sizes = [
    { kind: "wide", width: 960, narrow: false },
    { kind: "narrow", width: 340, narrow: true },
  ] as const;
  return sizes
    .map(
      ({ kind, ...size }) =>
        `<div class="scroll ${kind}" tabindex="0" role="region" aria-label="${escape(`Schedule of ${name}`)}">${draw({ turns, actors, id: `${id}-${kind}`, ...size })}</div>`,
    )
    .concat(legend)
    .join("\n");
}

const legend = `<ul class="legend" aria-label="Legend">
<li><i class="l-transaction"></i>transaction open</li>
<li><i class="l-wait"></i>waits for a lock</li>
<li><i class="l-release"></i>lets it go</li>
<li><i class="l-stale"></i>stale read</li>
<li><i class="l-error"></i>error</li>
<li><i class="l-switch"></i>switch</li>
</ul>`;
