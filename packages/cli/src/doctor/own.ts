/** Holdfast's own tables, which are as good as their unique keys. */
import { type Check, type Finding, findings } from "./check.ts";
import { listed } from "../text.ts";
import type { Patient } from "./patient.ts";

/** What a kind of server tells of them. */
export interface Own<P extends Patient> {
  /** Ids of the migrations that were applied; undefined if there are no tables of ours, which is allowed. */
  applied(patient: P): Promise<ReadonlySet<number> | undefined>;
  /** Whether this user would see routines of ours. Left out: everybody does. */
  seesRoutines?(patient: P): Promise<boolean>;
  /** Tables and their unique keys that hold, as "table" → ["a,b", "c"], in the order of the columns. */
  keys(patient: P): Promise<ReadonlyMap<string, readonly string[]>>;
  /** Tables whose rows do not survive a crash. */
  volatile?(patient: P): Promise<readonly { table: string; fix: string }[]>;
  quote(name: string): string;
}

export function ownChecks<P extends Patient>(own: Own<P>): readonly Check<P>[] {
  return [
    {
      id: "migrations",
      title: "Holdfast's own tables are not up to date",
      async run(patient): Promise<Finding[]> {
        const applied = await own.applied(patient);
        if (!applied) return [];
        const known = migrationsOf(patient);
        const missing = [...known].filter(([id]) => !applied.has(id));
        const sees = (await own.seesRoutines?.(patient)) ?? true;
        const stale = (await patient.server.hf.migrations()).filter(
          ({ kind, state }) => sees && kind === "routine" && (state === "missing" || state === "outdated"),
        );
        const unknown = [...applied].filter((id) => !known.has(id));
        const found: Finding[] = [];
        if (missing.length > 0)
          found.push({
            severity: "error",
            what: `not applied: ${missing.map(([id, name]) => `${id} (${name})`).join(", ")}`,
            why: "Calls that need these tables fail with HF_SCHEMA_MISSING.",
            fix: "holdfast migrate",
          });
        if (stale.length > 0)
          found.push({
            severity: "error",
            what: `${listed(stale.map(({ name }) => name))}: missing, or of an older Holdfast`,
            why: "Calls fail with HF_SCHEMA_MISSING, or do what an older version did, with its faults.",
            fix: "holdfast migrate",
          });
        if (unknown.length > 0)
          found.push({
            severity: "warning",
            what: `applied, but unknown here: ${unknown.join(", ")}`,
            why: "The tables were migrated by a newer Holdfast than this one: older processes may not know what newer ones write.",
            fix: "npm install holdfast@latest @holdfast/cli@latest",
          });
        return found;
      },
    },
    {
      id: "unique-keys",
      title: "a unique key of Holdfast's own tables is missing or invalid",
      async run(patient): Promise<Finding[]> {
        const applied = await own.applied(patient);
        if (!applied) return [];
        const there = await own.keys(patient);
        const missing = keysOf(patient.server.hf.migrationSql({ only: "tables" })).filter(
          ({ migration, table, columns }) =>
            applied.has(migration) && !there.get(table)?.includes(columns.join(",")),
        );
        return [
          ...findings(
            "error",
            "It is what lets an id, a fence or a level be there once only. Without it two callers at once are both let in.",
            missing.map(({ table, columns }) => ({
              what: there.has(table)
                ? `${table} has no unique key on (${columns.join(", ")})`
                : `the table ${table} is missing`,
              fix: there.has(table)
                ? `CREATE UNIQUE INDEX ${own.quote([table.split(".").at(-1), ...columns, "key"].join("_"))} ON ${table.startsWith('"') ? table : table.split(".").map(own.quote).join(".")} (${columns.map(own.quote).join(", ")});`
                : "Restore it from a backup: what was in it is what had been granted.",
            })),
          ),
          ...findings(
            "error",
            "After a crash the server empties it: what was granted is forgotten, and granted again.",
            ((await own.volatile?.(patient)) ?? []).map(({ table, fix }) => ({
              what: `${table} is not crash-safe`,
              fix,
            })),
          ),
        ];
      },
    },
  ];
}

/** `-- holdfast 3: leases`. */
function migrationsOf({ server }: Patient): ReadonlyMap<number, string> {
  return new Map(
    [...server.hf.migrationSql().matchAll(/^-- holdfast (\d+): (.+)$/gm)].map(([, id, name]) => [
      Number(id),
      name ?? "",
    ]),
  );
}

export interface OwnKey {
  readonly migration: number;
  readonly table: string;
  readonly columns: readonly string[];
}

const unquoted = (name: string): string => name.replaceAll(/["`]/g, "");

/** The keys that the migrations make, read from their own text: a new table needs no line here. */
export function keysOf(migrationSql: string): OwnKey[] {
  const keys: OwnKey[] = [];
  for (const part of migrationSql.split(/^(?=-- holdfast \d+: )/m)) {
    const migration = Number(/^-- holdfast (\d+)/.exec(part)?.[1]);
    for (const [, table = "", body = ""] of part.matchAll(
      /^CREATE TABLE IF NOT EXISTS ((?:"[^"]+"\.)?\S+) \(([^]*?)\)[^()]*;$/gm,
    ))
      for (const line of body.split("\n")) {
        const [, several] = /^\s*(?:PRIMARY KEY|UNIQUE(?: KEY \w+)?) \(([^)]*)\)?/.exec(line) ?? [];
        if (several !== undefined)
          keys.push({ migration, table, columns: several.split(/,\s*/).map(unquoted) });
        const [, one] = /^\s*["`]?(\w+)["`]? .*\b(?:PRIMARY KEY|UNIQUE)\b(?! *\()/.exec(line) ?? [];
        if (one !== undefined && several === undefined) keys.push({ migration, table, columns: [one] });
      }
  }
  return keys;
}
