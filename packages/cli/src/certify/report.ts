/** The certificate, for people: what does not hold first. */
import { wrapped } from "../doctor/report.ts";
import type { Colors } from "../terminal.ts";
import { plural, shown } from "../text.ts";
import type { Certificate } from "./certify.ts";
import { type Line, type Probe, type Verdict, verdicts } from "./probe.ts";

interface Paper {
  readonly width: number;
  readonly colors: Colors;
}

export const headings: Readonly<Record<Verdict, string>> = {
  fails: "Does not hold",
  unknown: "Not known",
  absent: "Not there, and Holdfast knows",
  holds: "Holds",
};
export const marks: Readonly<Record<Verdict, string>> = { fails: "✗", unknown: "?", absent: "–", holds: "✓" };

export function report(certificate: Certificate, { width, colors }: Paper): string {
  const { lines, refused } = certificate;
  const shades: Record<Verdict, (text: string) => string> = {
    fails: colors.red,
    unknown: colors.yellow,
    absent: colors.cyan,
    holds: colors.green,
  };
  const out = [
    ...wrapped(titleOf(certificate), width, "").map(colors.bold),
    ...wrapped(belief(certificate), width, ""),
    ...nodesOf(certificate).flatMap((text) => wrapped(text, width, "")),
    "",
  ];
  if (refused !== undefined)
    out.push(...wrapped(`Holdfast refuses this server: ${refused}`, width, "", "✗ ").map(colors.red), "");
  for (const verdict of verdicts) {
    const these = lines.filter((line) => line.verdict === verdict);
    if (these.length === 0) continue;
    out.push(colors.bold(shades[verdict](headings[verdict])), "");
    for (const line of these) {
      const [first = "", ...rest] = wrapped(
        `${nameOf(line)}: ${line.title}`,
        width,
        "",
        `${marks[verdict]} `,
      );
      out.push(shades[verdict](first), ...rest.map(shades[verdict]));
      for (const [word, text] of fields(line)) out.push(...field(word, text, width));
      out.push("");
    }
  }
  out.push(colors.bold(summary(certificate)));
  return out.join("\n");
}

/** What was tried, what was seen, what it carries, what to do. */
export function fields({ tried, seen, features, advice, verdict }: Line): [string, string][] {
  const all: [string, string][] = [
    ["tried", tried],
    ["seen", seen],
    ["for", features],
  ];
  if (verdict === "fails") all.push(["do", advice]);
  return all;
}

const column = 6;

function field(word: string, text: string, width: number): string[] {
  const head = `  ${word.padEnd(column)}`;
  // A history is drawn, line by line.
  if (text.includes("\n")) return [head.trimEnd(), ...text.split("\n").map((line) => `    ${shown(line)}`)];
  return wrapped(text, width, "", head);
}

export function titleOf({ kind, version, server }: Certificate): string {
  const names = { postgres: "PostgreSQL", mysql: "MySQL", mariadb: "MariaDB", sqlite: "SQLite" };
  const said = kind === "postgres" ? version.replace(/^(\S+ \S+).*$/s, "$1") : `${names[kind]} ${version}`;
  return `${said} at ${server}`;
}

export function belief({ capabilities }: Certificate): string {
  if (!capabilities) return "Holdfast takes no locks here.";
  const { transactionLocks, sessionLocks } = capabilities;
  const said = (support: typeof sessionLocks): string =>
    typeof support === "string" ? `"${support}"` : `none (${support.why})`;
  return `Holdfast's locks here: of transactions ${said(transactionLocks)}, of sessions ${said(sessionLocks)}.`;
}

/** Of the further nodes; or that there may be some. */
export function nodesOf({ nodes, alone }: Certificate): string[] {
  const told = nodes.map(
    ({ node, server, what, refused }) =>
      `Node ${node}, ${server}: ${what}${refused === undefined ? "" : ` (${refused})`}.`,
  );
  if (alone !== undefined)
    told.push(
      `This is one node of a cluster (${alone}), and was asked alone: one node cannot tell what holds between nodes. Name the others too: --node URL.`,
    );
  return told;
}

/** A probe, and between which nodes it was tried. */
export const nameOf = ({ id, node }: Line): string => (node === undefined ? id : `${id} on node ${node}`);

export function summary({ lines }: Pick<Certificate, "lines">): string {
  const count = (verdict: Verdict): number => lines.filter((line) => line.verdict === verdict).length;
  const parts = [
    [count("fails"), "do not hold", "does not hold"],
    [count("unknown"), "not known", "not known"],
    [count("absent"), "not there", "not there"],
    [count("holds"), "hold", "holds"],
  ] as const;
  const said = parts.filter(([n]) => n > 0).map(([n, many, one]) => `${n} ${n === 1 ? one : many}`);
  return `${plural(lines.length, "probe")}: ${said.join(", ")}`;
}

export function listed(probes: readonly Probe[], { width, colors }: Paper): string {
  return probes
    .flatMap(({ id, title, tried, features }) => [
      ...wrapped(`${id}: ${title}`, width, "").map(colors.bold),
      ...field("tried", tried, width),
      ...field("for", features, width),
    ])
    .join("\n");
}
