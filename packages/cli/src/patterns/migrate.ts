/** Holdfast's own tables: what is missing, and how it comes there. */
import { type Holdfast, type HoldfastOptions, type Migrated, type MigrationState, holdfast } from "holdfast";
import { audited } from "holdfast/audit";
import { Failure, exitCodes } from "../failure.ts";
import { listed, plural, shown } from "../text.ts";
import { type Kind, type Server, kindOf } from "../server.ts";
import { note, print, printJson } from "../terminal.ts";
import { given, givenSchema } from "../url.ts";
import { actorOf, agreed } from "./change.ts";
import { onServer } from "./place.ts";
import { printTable } from "./show.ts";

export interface MigrateOptions {
  readonly url?: string;
  readonly schema?: string;
  readonly yes?: true;
  readonly note?: string;
  readonly json?: true;
}

export interface PrintOptions {
  readonly url?: string;
  readonly schema?: string;
  readonly engine?: Kind;
  readonly from: number;
  readonly only?: "tables" | "routines";
  readonly json?: true;
}

const named = (what: MigrationState | Migrated) =>
  what.kind === "migration" ? `${what.id} ${shown(what.name)}` : shown(what.name);

/** Migrations by name, and so many routines. */
function told(all: readonly (MigrationState | Migrated)[]): string {
  const migrations = all.filter(({ kind }) => kind === "migration");
  const routines = all.filter(({ kind }) => kind === "routine");
  return [
    ...migrations.map(named),
    ...(routines.length > 0
      ? [`${plural(routines.length, "routine")} (${listed(routines.map(named))})`]
      : []),
  ].join(", ");
}

const counted = (all: readonly (MigrationState | Migrated)[]) =>
  [
    ["migration", all.filter(({ kind }) => kind === "migration").length] as const,
    ["routine", all.filter(({ kind }) => kind === "routine").length] as const,
  ]
    .filter(([, n]) => n > 0)
    .map(([kind, n]) => plural(n, kind))
    .join(" and ");

const isDue = ({ state }: MigrationState) => state === "missing" || state === "outdated";

export async function migrate(options: MigrateOptions): Promise<void> {
  await onServer("migrate", options, async (server) => {
    const states = await server.hf.migrations();
    const due = states.filter(isDue);
    warnOfUnknown(states);
    if (due.length === 0) {
      if (options.json) printJson({ applied: [] });
      else print(`Nothing to do: ${counted(states)} applied in ${server.shown}.`);
      return;
    }
    note(`To be applied in ${server.shown}: ${told(due)}.`);
    if (!(await agreed(`Apply ${counted(due)}?`, options))) return;
    const applied = await apply(server, states, options);
    if (options.json) printJson({ applied });
    else if (applied.length === 0) print("Nothing to do: somebody else has applied them meanwhile.");
    else print(`Applied ${told(applied)}.`);
  });
}

/** The audit is one of the tables that may be missing: then the line comes after. */
async function apply(
  server: Server,
  states: readonly MigrationState[],
  options: MigrateOptions,
): Promise<Migrated[]> {
  const { hf } = server;
  const what = {
    action: "migrate",
    target: "migrate",
    actor: await actorOf(server),
    details: { note: options.note },
  };
  const capabilities = await hf.capabilities();
  if (capabilities.audit !== true) return hf.migrate();
  const there = states.some(({ name, state }) => name === "audit" && state !== "missing");
  if (there) return audited(hf, what, () => hf.migrate());
  const applied = await hf.migrate();
  return audited(hf, what, async () => applied);
}

function warnOfUnknown(states: readonly MigrationState[]): void {
  const unknown = states.filter(({ state }) => state === "unknown");
  if (unknown.length > 0) note(`Applied by a newer version of Holdfast than this one: ${told(unknown)}.`);
}

export async function status(options: MigrateOptions): Promise<void> {
  await onServer("migrate", options, async (server) => {
    const migrations = await server.hf.migrations();
    const due = migrations.filter(isDue);
    if (due.length > 0) process.exitCode = exitCodes.no;
    if (options.json) {
      printJson({
        migrations,
        missing: due.filter(({ state }) => state === "missing").length,
        outdated: due.filter(({ state }) => state === "outdated").length,
      });
      return;
    }
    warnOfUnknown(migrations);
    printTable(
      ["id", "state", "name"],
      migrations.map((each) => [
        each.kind === "migration" ? each.id : "routine",
        each.state,
        shown(each.name),
      ]),
    );
    print();
    print(
      due.length === 0
        ? "All of them are applied."
        : `${due.length} of ${migrations.length} are missing or outdated: run holdfast migrate.`,
    );
  });
}

/** No connection is made. */
export async function printSql(options: PrintOptions): Promise<void> {
  const engine = options.engine ?? engineOf(options.url);
  const { hf, close } = await unconnected(engine, { schema: givenSchema(options.schema) });
  try {
    const { from, only } = options;
    const sql = hf.migrationSql({ from, ...(only && { only }) });
    if (only !== "routines" && hf.migrationSql({ from, only: "tables" }) === "")
      throw new Failure(`There is no migration ${options.from} of ${engine}: print them all without --from.`);
    if (options.json) printJson({ engine, from: options.from, sql });
    else print(sql.trimEnd());
  } finally {
    await hf.close();
    await close();
  }
}

function engineOf(url: string | undefined): Kind {
  const found = given(url);
  if (!found) throw new Failure("SQL for which database? Name it with --engine, or with --url.");
  return kindOf(found.url);
}

async function unconnected(
  engine: Kind,
  settings: HoldfastOptions,
): Promise<{ readonly hf: Holdfast<unknown>; close(): Promise<unknown> | void }> {
  if (engine === "postgres") {
    const [{ Pool }, { fromPg }] = await Promise.all([import("pg"), import("holdfast/pg")]);
    const pool = new Pool();
    return { hf: holdfast(fromPg(pool), settings), close: () => pool.end() };
  }
  if (engine === "sqlite") {
    const [{ DatabaseSync }, { fromNodeSqlite }] = await Promise.all([
      import("node:sqlite"),
      import("holdfast/node-sqlite"),
    ]);
    return {
      hf: holdfast(
        fromNodeSqlite(() => new DatabaseSync(":memory:")),
        settings,
      ),
      close: () => {},
    };
  }
  const [{ createPool }, { fromMysql2 }] = await Promise.all([
    import("mysql2/promise"),
    import("holdfast/mysql2"),
  ]);
  const pool = createPool({});
  return { hf: holdfast(fromMysql2(pool), settings), close: () => pool.end() };
}
