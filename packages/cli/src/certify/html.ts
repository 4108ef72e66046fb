/** The certificate as one page that needs nothing else: no script, no network. */
import { style } from "../race/style.ts";
import { escape } from "../race/text.ts";
import { type Certificate } from "./certify.ts";
import type { Line, Verdict } from "./probe.ts";
import { verdicts } from "./probe.ts";
import { belief, fields, headings, marks, nameOf, nodesOf, summary, titleOf } from "./report.ts";

const badges: Readonly<Record<Verdict, string>> = {
  fails: "race",
  unknown: "error",
  absent: "",
  holds: "ok",
};

export function htmlReport(certificate: Certificate): string {
  const { lines, refused, nodes } = certificate;
  const well =
    [{ refused }, ...nodes].every((each) => each.refused === undefined) &&
    lines.every(({ verdict }) => verdict === "holds" || verdict === "absent");
  const parts = verdicts.map((verdict) =>
    section(
      verdict,
      lines.filter((line) => line.verdict === verdict),
    ),
  );
  return `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>${well ? "✓" : "✗"} ${escape(titleOf(certificate))}</title>
<style>${style}
h3 code { overflow-wrap: anywhere; }
article + article { border-top: 1px solid var(--line); margin-top: 16px; padding-top: 4px; }
article dl { display: block; } article dl div { display: flex; gap: 12px; margin: 4px 0; } article dt { flex: 0 0 3.5em; } article dd { min-width: 0; overflow-wrap: anywhere; }
</style>
</head>
<body>
<main>
<header>
<h1>${escape(titleOf(certificate))}</h1>
<p class="${well ? "ok" : "race"}">${escape(summary(certificate))}</p>
${[belief(certificate), ...nodesOf(certificate)].map((text) => `<p>${escape(text)}</p>`).join("\n")}
</header>
${refused === undefined ? "" : `<pre class="error">${escape(`Holdfast refuses this server: ${refused}`)}</pre>`}
${parts.join("\n")}
</main>
</body>
</html>
`;
}

function section(verdict: Verdict, lines: readonly Line[]): string {
  if (lines.length === 0) return "";
  return `<section aria-labelledby="${verdict}">
<h2 id="${verdict}">${headings[verdict]} <span class="badge ${badges[verdict]}">${marks[verdict]} ${lines.length}</span></h2>
${lines.map(article).join("\n")}
</section>`;
}

function article(line: Line): string {
  const items = fields(line).map(([word, text]) => {
    const value = text.includes("\n") ? `<div class="scroll"><pre>${escape(text)}</pre></div>` : escape(text);
    return `<div><dt>${word}</dt><dd>${value}</dd></div>`;
  });
  const id = escape(`p-${line.id}${line.node === undefined ? "" : `-${line.node}`}`);
  return `<article aria-labelledby="${id}">
<h3 id="${id}"><code>${escape(nameOf(line))}</code> ${escape(line.title)}</h3>
<dl>${items.join("")}</dl>
</article>`;
}
