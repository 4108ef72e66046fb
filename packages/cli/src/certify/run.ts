/** `holdfast certify`. */
import { mkdir, writeFile } from "node:fs/promises";
import { dirname, resolve } from "node:path";
import { Failure, exitCodes, interruptible } from "../failure.ts";
import { keepJsonError } from "../json.ts";
import { type Server, connect } from "../server.ts";
import { colorsOf, fit, note, print, printJson } from "../terminal.ts";
import { type Certificate, certify } from "./certify.ts";
import { htmlReport } from "./html.ts";
import { probes } from "./probes.ts";
import { listed, report, summary } from "./report.ts";

export interface CertifyFlags {
  readonly url?: string;
  readonly schema?: string;
  readonly node?: readonly string[];
  readonly only?: readonly string[];
  readonly list?: true;
  readonly readOnly?: true;
  readonly html?: string;
  readonly json?: true;
}

export async function runCertify(url: string | undefined, flags: CertifyFlags): Promise<number> {
  refuseUnknown(flags.only ?? []);
  const width = Math.min(process.stdout.columns ?? 100, 100);
  const paper = { width, colors: colorsOf(process.stdout) };
  if (flags.list) {
    const all = probes.map(({ id, title, tried, carries, features }) => ({
      id,
      title,
      tried,
      carries,
      features,
    }));
    if (flags.json) printJson({ probes: all });
    else print(listed(probes, paper));
    return exitCodes.ok;
  }
  if (url !== undefined && flags.url !== undefined)
    throw new Failure("The database is named twice: leave --url out.");
  using stop = interruptible();
  await using server = await connect({
    url: url ?? flags.url,
    schema: flags.schema,
    application: "holdfast certify",
  });
  await using further = new AsyncDisposableStack();
  const nodes: Server[] = [];
  for (const each of flags.node ?? []) nodes.push(further.use(await nodeOf(server, each, flags)));
  const certificate = await certify(server, {
    only: flags.only,
    nodes,
    readOnly: flags.readOnly,
    signal: stop.signal,
    say: note,
    progress,
  }).finally(quiet);
  if (flags.html !== undefined) {
    const path = resolve(flags.html);
    await mkdir(dirname(path), { recursive: true });
    await writeFile(path, htmlReport(certificate));
    note(`Report: ${flags.html}`);
  }
  const code = exitCodeOf(certificate, flags);
  if (code === exitCodes.failed) {
    const message = `What could not be tried is not known: ${summary(certificate)}.`;
    keepJsonError({ message, exitCode: code });
    if (!flags.json) print(report(certificate, paper));
    console.error(`holdfast: ${message}`);
  } else if (!flags.json) print(report(certificate, paper));
  if (flags.json) printJson(jsonOf(certificate));
  return code;
}

async function nodeOf(first: Server, url: string, { schema }: CertifyFlags): Promise<Server> {
  const family = first.kind === "mariadb" ? "mysql" : first.kind;
  if (family === "sqlite") throw new Failure("A file has no other nodes: leave --node out.");
  const kinds = family === "mysql" ? (["mysql", "mariadb"] as const) : ([family] as const);
  return connect({
    url,
    by: "--node",
    schema,
    kinds,
    instead: `Nodes of one cluster are of one kind, and the first one is ${first.shown}.`,
    application: "holdfast certify",
  });
}

/** 1: something that Holdfast relies on does not hold. 2: of something it is not known. */
export function exitCodeOf(
  { lines, refused, nodes }: Certificate,
  { readOnly }: { readonly readOnly?: boolean | undefined } = {},
): number {
  if ([{ refused }, ...nodes].some((each) => each.refused !== undefined)) return exitCodes.no;
  if (lines.some(({ verdict }) => verdict === "fails")) return exitCodes.no;
  // Whoever has left a part out knows that.
  return !readOnly && lines.some(({ verdict }) => verdict === "unknown") ? exitCodes.failed : exitCodes.ok;
}

function jsonOf(certificate: Certificate): object {
  const { server, kind, version, capabilities, refused, lines, nodes, alone } = certificate;
  return {
    server,
    kind,
    version,
    ...(refused === undefined ? {} : { refused }),
    locks: capabilities?.transactionLocks,
    ...(nodes.length === 0 ? {} : { nodes }),
    ...(alone === undefined ? {} : { alone }),
    probes: lines.map(({ id, node, title, verdict, tried, seen, carries, features, advice }) => ({
      id,
      ...(node === undefined ? {} : { node }),
      title,
      verdict,
      tried,
      seen,
      carries,
      features,
      ...(verdict === "holds" ? {} : { advice }),
    })),
  };
}

function refuseUnknown(ids: readonly string[]): void {
  const strange = ids.filter((id) => !probes.some((probe) => probe.id === id));
  if (strange.length > 0)
    throw new Failure(
      `There is no probe ${strange.map((id) => `"${id}"`).join(", ")}. \`holdfast certify --list\` tells which there are.`,
    );
}

/** A line that is written over, for people who watch. */
function progress(id: string, done: number, all: number): void {
  const { stderr } = process;
  if (stderr.isTTY) stderr.write(`\r\u001B[2K${fit(`${done + 1}/${all} ${id}`, stderr.columns - 1)}`);
}

function quiet(): void {
  if (process.stderr.isTTY) process.stderr.write("\r\u001B[2K");
}
