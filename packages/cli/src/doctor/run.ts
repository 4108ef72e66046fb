import { Failure, exitCodes, interruptible, jsonErrorOf } from "../failure.ts";
import { keepJsonError } from "../json.ts";
import { type Kind, connect, kindOf } from "../server.ts";
import { colorsOf, fit, print, printJson } from "../terminal.ts";
import { defaultSchema, given } from "../url.ts";
import { severities } from "./check.ts";
import type { Examined } from "./examine.ts";
import { practices } from "./kinds.ts";
import { errorsOf, hasErrors, heading, listed, withoutErrors } from "./report.ts";

export interface DoctorOptions {
  readonly url?: string;
  readonly schema?: string;
  readonly only?: readonly string[];
  readonly skip?: readonly string[];
  readonly list?: true;
  readonly strict?: true;
  readonly json?: true;
}

export async function runDoctor(options: DoctorOptions): Promise<number> {
  refuseUnknown([...(options.only ?? []), ...(options.skip ?? [])], Object.keys(practices) as Kind[]);
  if (options.list) return list(options);
  using stop = interruptible();
  await using server = await connect({
    url: options.url,
    schema: options.schema,
    application: "holdfast doctor",
    // It has to speak on a server that has no other left.
    most: 1,
  });
  const practice = practices[server.kind];
  // Of another kind of server: a mistake, unless it is left out anyway.
  refuseUnknown(options.only ?? [], [server.kind]);
  const count = practice.checks.filter(({ id }) => wanted(id, options)).length;
  if (count === 0) throw new Failure("No check is left: --skip names all of them.");
  const paper = { width: Math.min(process.stdout.columns ?? 100, 100), colors: colorsOf(process.stdout) };
  const told = progress(count);
  const examined: Examined[] = [];
  let version = "";
  let failure: unknown;
  try {
    await practice.examine(server, (id) => wanted(id, options), {
      signal: stop.signal,
      admitted(found) {
        ({ version } = found);
        if (!options.json) print(heading(`${found.title} at ${server.shown}`, paper));
      },
      progress: (id) => told(id, examined.length),
      done(each) {
        const first = !examined.some(hasErrors);
        examined.push(each);
        if (options.json || !hasErrors(each)) return;
        quiet();
        print(errorsOf(each, first, paper));
      },
    });
  } catch (error) {
    // What was found before is worth all the more.
    if (examined.length === 0) throw error;
    failure = error;
    keepJsonError(jsonErrorOf(error));
  } finally {
    quiet();
  }
  const findings = examined
    .flatMap((each) =>
      each.findings.map(({ severity, what, why, fix, blind }) => ({
        check: each.id,
        severity,
        what,
        why,
        fix,
        ...(blind ? { couldNotLook: true } : {}),
      })),
    )
    .toSorted((a, b) => severities.indexOf(a.severity) - severities.indexOf(b.severity));
  if (options.json)
    printJson({
      server: server.shown,
      kind: server.kind,
      version,
      findings,
      checks: examined.map(({ id, title, status, more }) => ({
        id,
        title,
        status,
        ...(more > 0 ? { more } : {}),
      })),
    });
  else print(withoutErrors(examined, count, paper));
  if (!options.json && server.schema !== defaultSchema && findings.length > 0)
    print(
      `\nThis is about the schema ${server.schema}: give what is named above \`--schema\`, or HOLDFAST_SCHEMA, too.`,
    );
  if (failure !== undefined) throw failure;
  return verdict(examined, options);
}

function verdict(examined: readonly Examined[], { strict }: DoctorOptions): number {
  const bad = examined
    .flatMap(({ findings }) => findings)
    .some(({ severity }) => severity === "error" || (strict && severity === "warning"));
  return bad ? exitCodes.no : exitCodes.ok;
}

const wanted = (id: string, { only, skip }: DoctorOptions): boolean =>
  (only === undefined || only.includes(id)) && !skip?.includes(id);

function refuseUnknown(ids: readonly string[], kinds: readonly Kind[]): void {
  const known = new Set(kinds.flatMap((kind) => practices[kind].checks.map(({ id }) => id)));
  const unknown = ids.filter((id) => !known.has(id));
  if (unknown.length === 0) return;
  const [kind] = kinds;
  const where = kinds.length === 1 && kind ? ` of ${practices[kind].name}` : "";
  throw new Failure(
    `There is no check ${unknown.map((id) => `"${id}"`).join(", ")}${where}. \`holdfast doctor --list\` tells which there are.`,
  );
}

/** Of the kind that the address names, else of all: no connection is needed to read. */
function list(options: DoctorOptions): number {
  const address = given(options.url);
  const all = Object.keys(practices) as Kind[];
  const kinds = address ? [kindOf(address)] : all;
  const found = kinds.map((kind) => ({
    kind,
    name: practices[kind].name,
    checks: practices[kind].checks
      .filter(({ id }) => wanted(id, options))
      .map(({ id, title }) => ({ id, title })),
  }));
  if (options.json) printJson({ kinds: found });
  else print(listed(found, { width: process.stdout.columns ?? 100, colors: colorsOf(process.stdout) }));
  return exitCodes.ok;
}

/** A line that is written over, for people who watch. */
function progress(total: number): (id: string, done: number) => void {
  const { stderr } = process;
  if (!stderr.isTTY) return () => {};
  return (id, done) => {
    stderr.write(`\r\u001B[2K${fit(`${done + 1}/${total} ${id}`, stderr.columns - 1)}`);
  };
}

function quiet(): void {
  if (process.stderr.isTTY) process.stderr.write("\r\u001B[2K");
}
