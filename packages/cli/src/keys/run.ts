import { readFileSync } from "node:fs";
import type { Key } from "holdfast";
import { Failure, exitCodes } from "../failure.ts";
import { shown } from "../text.ts";
import { connect, kindOf } from "../server.ts";
import { colorsOf, fit, print, printJson, table } from "../terminal.ts";
import { given, givenSchema } from "../url.ts";
import { type Facts, byName, factsOf, hashOf } from "./facts.ts";
import { parseKey, readings, written } from "./parse.ts";
import { type InUse, type Used, candidates, collisions, inUse, namespaceOf } from "./used.ts";

export interface KeysOptions {
  readonly url?: string;
  readonly schema?: string;
  readonly find?: string;
  readonly names?: string;
  readonly database?: string;
  readonly json?: true;
}

export async function runKeys(names: readonly string[], options: KeysOptions): Promise<void> {
  if (options.find !== undefined) return find(options.find, names, options);
  if (names.length > 0 || options.names !== undefined)
    return describeKeys([...names.map(parseKey), ...listed(options.names).map(parseKey)], options);
  return survey(options);
}

/** One on each line. */
function listed(from: string | undefined): string[] {
  if (from === undefined) return [];
  let text: string;
  try {
    text = readFileSync(from === "-" ? 0 : from, "utf8");
  } catch (error) {
    throw new Failure(`Could not read names from ${from === "-" ? "standard input" : from}.`, {
      cause: error,
    });
  }
  return text.split(/\r?\n/).filter((line) => line !== "");
}

/** The name of the database on MySQL and MariaDB, where a name of GET_LOCK depends on it. */
function databaseOf(url: string | undefined): string | undefined {
  const found = given(url);
  if (!found || !URL.canParse(found.url)) return undefined;
  const kind = kindOf(found);
  return kind === "mysql" || kind === "mariadb"
    ? decodeURIComponent(new URL(found.url).pathname.slice(1)) || undefined
    : undefined;
}

function describeKeys(keys: readonly Key[], { url, schema, database, json }: KeysOptions): void {
  const facts = keys.map((key) => factsOf(key, givenSchema(schema), database ?? databaseOf(url)));
  if (json) return printJson({ keys: facts.map((each) => ({ ...each, sqlByName: byName(each) })) });
  for (const [i, each] of facts.entries()) {
    if (i > 0) print();
    for (const line of lines(keys[i] as Key, each)) print(line);
  }
}

function lines(key: Key, facts: Facts): string[] {
  const { bold } = colorsOf(process.stdout);
  const name = byName(facts);
  const rows: [string, string][] = [
    ["parts", shown(JSON.stringify(facts.parts))],
    ["hexadecimal", facts.hex],
    ["bigint", facts.bigint],
    ["pg_locks", `classid ${facts.classid}, objid ${facts.objid}, objsubid 1`],
    ["PostgreSQL", facts.sql.postgres],
    ...(name === undefined
      ? []
      : [["", `SELECT pg_advisory_xact_lock(${shown(name)});`] as [string, string]]),
    ["who has it", facts.sql.holders],
    ["MySQL, row", `${facts.schema}_lock.id = '${facts.id}'`],
    ["", shown(facts.sql.mysql)],
    [
      "MySQL, session",
      facts.getLock === undefined
        ? `GET_LOCK(CONCAT('holdfast:', LEFT(SHA2(CONCAT(DATABASE(), ':', '${facts.id}'), 256), 40)), …)`
        : `GET_LOCK('${facts.getLock}', …)`,
    ],
    ["lease", `resource 'lease ${facts.id}'`],
  ];
  return [bold(written(key)), ...rows.map(([title, value]) => `  ${title.padEnd(15)}${value}`)];
}

/** 123, -123, 0x1f…, or 12,34 as pg_locks has it. */
function numberOf(text: string): bigint {
  const bad = () =>
    new Failure(
      `"${shown(text)}" is not the number of a lock. It is one of 64 bits (2939424002059277525, 0x28cb…), or classid,objid.`,
    );
  const two = /^\s*(-?\d+)\s*,\s*(-?\d+)\s*$/.exec(text);
  if (two) {
    const [a, b] = [BigInt(two[1] as string), BigInt(two[2] as string)];
    for (const half of [a, b]) if (half < -(2n ** 31n) || half >= 2n ** 32n) throw bad();
    const bits = (BigInt.asUintN(32, a) << 32n) | BigInt.asUintN(32, b);
    return BigInt.asIntN(64, bits);
  }
  if (!/^\s*(?:-?\d+|0x[0-9a-f]{1,16})\s*$/i.test(text)) throw bad();
  const number = BigInt(text.trim());
  if (number < -(2n ** 63n) || number >= 2n ** 64n) throw bad();
  return BigInt.asIntN(64, number);
}

async function find(text: string, names: readonly string[], options: KeysOptions): Promise<void> {
  const number = numberOf(text);
  const schema = givenSchema(options.schema);
  const typed = [...names, ...listed(options.names)];
  const known = new Map<bigint, Key>();
  for (const line of typed) {
    const exact = parseKey(line);
    known.set(hashOf(exact, schema), exact);
    // A list in JSON is read as it stands.
    if (exact.parts.join(":") === line)
      for (const each of readings(line))
        if (!known.has(hashOf(each, schema))) known.set(hashOf(each, schema), each);
  }
  let used: readonly Used[] = [];
  const asked = given(options.url) !== undefined;
  if (!asked && typed.length === 0)
    throw new Failure(
      "Among which names? Name a database (--url, HOLDFAST_URL, DATABASE_URL), or give names (--names - reads them).",
    );
  if (!known.has(number) && asked) {
    await using server = await connect({
      url: options.url,
      schema: options.schema,
      application: "holdfast keys",
    });
    used = (await inUse(server)).used;
  }
  // Known by its number, or by a name that hashes to it.
  const direct = used.find(({ bigint, name }) => bigint === number && name !== "");
  const key =
    known.get(number) ??
    candidates(
      used.map(({ name }) => name),
      schema,
    ).get(number);
  const name = key ? written(key) : direct && shown(direct.name);
  if (options.json)
    printJson({ bigint: String(number), name: key?.name ?? direct?.name ?? null, parts: key?.parts ?? null });
  else if (name !== undefined) print(`${number} is ${name}`);
  else print(`Among ${typed.length + used.length} names, none is ${number}.`);
  if (name === undefined) process.exitCode = exitCodes.no;
}

async function survey({ url, schema, json }: KeysOptions): Promise<void> {
  await using server = await connect({ url, schema, application: "holdfast keys" });
  const found = await inUse(server);
  const spaces = namespaces(found);
  const clashes = collisions(found);
  if (json)
    return printJson({
      namespaces: spaces.map(({ keys, ...rest }) => ({
        ...rest,
        keys: keys.map(({ name, bigint }) => ({
          name,
          bigint: bigint === undefined ? null : String(bigint),
        })),
      })),
      collisions: clashes.map((clash) => ({
        ...clash,
        bare: clash.bare.map((each) => ({
          ...each,
          number: typeof each.number === "bigint" ? String(each.number) : each.number,
        })),
      })),
    });
  if (spaces.length === 0) {
    print(`No key is in use in ${server.shown}.`);
    return;
  }
  const width = process.stdout.isTTY ? process.stdout.columns : Infinity;
  const rows = spaces.map(({ namespace, places, keys }) => {
    const ids = keys.flatMap(({ name, bigint }) =>
      bigint === undefined
        ? []
        : [`${name === namespace ? "" : `${shown(name.slice(namespace.length + 1))} = `}${bigint}`],
    );
    return [
      shown(namespace),
      places.join(", "),
      keys.length,
      ids.slice(0, 3).join("  ") + (ids.length > 3 ? "  …" : ""),
    ];
  });
  for (const line of table(["namespace", "seen as", "keys", "ids"], rows).split("\n"))
    print(fit(line, width));
  print();
  if (clashes.length === 0) print("No two names have one id.");
  for (const { bigint, names, bare } of clashes) {
    const list = names.map(shown).join(" and ");
    if (names.length > 1) print(`Collision: ${list} are all ${bigint}: they wait for each other.`);
    for (const { session, application, number, same } of bare) {
      const who = `session ${shown(session)}${application ? ` (${shown(application)})` : ""}`;
      if (same)
        print(
          `${list} is ${bigint}, which ${who} has or wants under no name: another program's lock, perhaps.`,
        );
      else if (typeof number !== "bigint")
        print(
          `${who} has (${number.join(", ")}), which pg_locks shows like ${list}; it is another lock (objsubid 2).`,
        );
    }
  }
}

interface Namespace {
  readonly namespace: string;
  readonly places: readonly string[];
  readonly keys: readonly { readonly name: string; readonly bigint: bigint | undefined }[];
}

function namespaces({ used }: InUse): Namespace[] {
  const groups = Map.groupBy(used, ({ name, place }) =>
    place === "queue" || place === "schedule" ? `${place} ${name}` : namespaceOf(name) || "(no name)",
  );
  return [...groups]
    .map(([namespace, entries]) => {
      const keys = new Map<string, { name: string; bigint: bigint | undefined }>();
      for (const { name, bigint } of entries) {
        const id = JSON.stringify([name, bigint === undefined ? null : String(bigint)]);
        keys.set(id, { name, bigint });
      }
      // One that is known with its number need not be there without.
      const numbered = new Set([...keys.values()].filter((k) => k.bigint !== undefined).map((k) => k.name));
      return {
        namespace,
        places: [...new Set(entries.map(({ place }) => place))],
        keys: [...keys.values()].filter((k) => k.bigint !== undefined || !numbered.has(k.name)),
      };
    })
    .toSorted((a, b) => (a.namespace < b.namespace ? -1 : 1));
}
