/** The result as one page that needs nothing else: no script, no network. */
import { style } from "../race/style.ts";
import { escape } from "../race/text.ts";
import { chart } from "./chart.ts";
import { workMs } from "./race.ts";
import {
  type DemoResult,
  type Next,
  type RaceResult,
  type WayResult,
  conclusion,
  marks,
  reasonOf,
  saidOf,
  speedOf,
  timesOf,
} from "./result.ts";

const own = `
.chart text { fill: var(--ink); font: 14px system-ui, sans-serif; }
.chart .way { font-weight: 600; }
.chart .bar.exact { fill: var(--ok); } .chart .value.exact { fill: var(--ok); }
.chart .bar.wrong { fill: var(--race); opacity: .45; } .chart .bar.over { fill: var(--race); } .chart .value.wrong { fill: var(--race); }
.chart .bar.failed, .chart .bar.lucky { fill: var(--wait); } .chart .value.failed, .chart .value.lucky { fill: var(--wait); }
.chart line.due { stroke: var(--ink); stroke-width: 2; stroke-dasharray: 4 3; }
.chart text.due { fill: var(--soft); }
.chart { display: block; max-width: 100%; margin: 12px 0; overflow: visible; }
.way h3 .exact, td.exact { color: var(--ok); } .way h3 .wrong, td.wrong { color: var(--race); }
.way h3 .failed, .way h3 .lucky, td.failed, td.lucky { color: var(--wait); }
.way pre { background: var(--box); border: 1px solid var(--line); border-radius: 6px; padding: 8px 12px; overflow-x: auto; }
td.number, th.number { text-align: end; padding-right: 0; }
th[scope=rowgroup] { padding-top: 14px; border: 0; } th[scope=row] { font-weight: 400; }
@media (max-width: 720px) { td, th { padding-right: 10px; } .way pre { white-space: pre-wrap; } }
`;

export function page(result: DemoResult, { more, own: yours }: Next): string {
  const { races, exact, postgres, server, processes, callers } = result;
  const facts = {
    PostgreSQL: postgres + (server === undefined ? ", a server of its own" : ` on ${server}`),
    Processes: `${processes}, with ${callers} callers each`,
    "Between check and write": `${workMs} ms of other work`,
    Time: `${Math.round(result.seconds)} s`,
  };
  return `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>${exact ? "✓" : "✗"} Races, naive and with Holdfast</title>
<style>${style}${own}</style>
</head>
<body>
<main>
<header>
<h1>Races: code as it is often written, and the same with Holdfast</h1>
<p class="${exact ? "ok" : "race"}">${escape(conclusion(result))}</p>
<p>Several processes run the same code at the same time, as instances of a service do. What counts is what the tables hold afterwards.</p>
<dl>${Object.entries(facts)
    .map(([term, text]) => `<div><dt>${escape(term)}</dt><dd>${escape(text)}</dd></div>`)
    .join("")}</dl>
</header>
<section aria-labelledby="all">
<h2 id="all">All of it</h2>
<div class="scroll" tabindex="0" role="region" aria-label="All results"><table>
<thead><tr><th scope="col">Written</th><th scope="col"></th><th scope="col">What the tables say</th><th scope="col" class="number">op/s</th><th scope="col" class="number">p50/p99 ms</th></tr></thead>
${races.map(rows).join("\n")}
</table></div>
</section>
${races.map(section).join("\n")}
<section aria-labelledby="next">
<h2 id="next">More</h2>
<ul>${more.map(([what, why]) => `<li><code>${escape(what)}</code>: ${escape(why)}</li>`).join("")}</ul>
<p>${escape(yours.why)}: <code>${escape(yours.command)}</code></p>
</section>
</main>
<script type="application/json" id="facts">${JSON.stringify(result).replaceAll("<", String.raw`\u003c`)}</script>
</body>
</html>
`;
}

function rows({ race, title, ways }: RaceResult): string {
  const head = `<tr><th scope="rowgroup" colspan="5"><a href="#${escape(race)}">${escape(title)}</a></th></tr>`;
  const lines = ways.map(
    (way) =>
      `<tr><th scope="row">${escape(way.way)}</th><td class="${way.verdict}">${marks[way.verdict]}</td><td>${escape(saidOf(way))}</td><td class="number">${speedOf(way)}</td><td class="number">${timesOf(way)}</td></tr>`,
  );
  return `<tbody>${head}${lines.join("")}</tbody>`;
}

function section(result: RaceResult): string {
  const { race, title, what, ways } = result;
  // Drawn twice, since text in a picture does not wrap by itself; a page shows the one that fits.
  return `<section id="${escape(race)}" aria-labelledby="${escape(race)}-title">
<h2 id="${escape(race)}-title">${escape(title)}</h2>
<p>${escape(what)}</p>
<div class="wide">${chart(result, 900)}</div>
<div class="narrow">${chart(result, 290)}</div>
${ways.map(wayOf).join("\n")}
</section>`;
}

function wayOf(way: WayResult): string {
  const reason = reasonOf(way);
  return `<div class="way">
<h3>${escape(way.way)}: <span class="${way.verdict}">${marks[way.verdict]} ${escape(saidOf(way))}</span></h3>
<pre tabindex="0">${escape(way.code.join("\n"))}</pre>
${reason === "" ? "" : `<p>${escape(reason)}</p>`}
</div>`;
}
