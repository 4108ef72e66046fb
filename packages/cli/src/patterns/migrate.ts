/** Holdfast's own tables: what is missing, and how it comes there. */
import { type Holdfast, type MigrationState, holdfast } from "holdfast";
import { audited } from "holdfast/audit";
import type { MigrateOptions, PrintOptions } from "../commands/migrate.ts";
import { Failure, exitCodes } from "../failure.ts";
import { plural, shown } from "../text.ts";
import { type Kind, type Server, kindOf } from "../server.ts";
import { note, print, printJson } from "../terminal.ts";
import { given } from "../url.ts";
import { actorOf, agreed } from "./change.ts";
import { onServer } from "./place.ts";
import { printTable } from "./show.ts";

const named = ({ id, name }: Pick<MigrationState, "id" | "name">) => `${id} ${shown(name)}`;

export async function migrate(options: MigrateOptions): Promise<void> {
  await onServer("migrate", options, async (server) => {
    const states = await server.hf.migrations();
    const missing = states.filter(({ state }) => state === "missing");
    warnOfUnknown(states);
    if (missing.length === 0) {
      // A dump has the record of procedures, but not these themselves: they are made again.
      if (server.kind === "mysql" || server.kind === "mariadb") await server.hf.migrate();
      if (options.json) printJson({ applied: [] });
      else print(`Nothing to do: ${plural(states.length, "migration")} applied in ${server.shown}.`);
      return;
    }
    note(`To be applied in ${server.shown}: ${missing.map(named).join(", ")}.`);
    if (!(await agreed(`Apply ${plural(missing.length, "migration")}?`, options))) return;
    const applied = await apply(server, states, options);
    if (options.json) printJson({ applied });
    else if (applied.length === 0) print("Nothing to do: somebody else has applied them meanwhile.");
    else print(`Applied ${applied.map(named).join(", ")}.`);
  });
}

/** The audit is one of the tables that may be missing: then the line comes after. */
async function apply(
  server: Server,
  states: readonly MigrationState[],
  options: MigrateOptions,
): Promise<{ id: number; name: string }[]> {
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
  if (unknown.length > 0)
    note(`Applied by a newer version of Holdfast than this one: ${unknown.map(named).join(", ")}.`);
}

export async function status(options: MigrateOptions): Promise<void> {
  await onServer("migrate", options, async (server) => {
    const migrations = await server.hf.migrations();
    const missing = migrations.filter(({ state }) => state === "missing");
    if (missing.length > 0) process.exitCode = exitCodes.no;
    if (options.json) {
      printJson({ migrations, missing: missing.length });
      return;
    }
    warnOfUnknown(migrations);
    printTable(
      ["id", "state", "name"],
      migrations.map(({ id, name, state }) => [id, state, shown(name)]),
    );
    print();
    print(
      missing.length === 0
        ? "All of them are applied."
        : `${missing.length} of ${migrations.length} are missing: run holdfast migrate.`,
    );
  });
}

/** No connection is made. */
export async function printSql(options: PrintOptions): Promise<void> {
  const engine = options.engine ?? engineOf(options.url);
  const { hf, close } = await unconnected(engine);
  try {
    const sql = hf.migrationSql({ from: options.from });
    if (sql === "")
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
): Promise<{ readonly hf: Holdfast<unknown>; close(): Promise<unknown> | void }> {
  if (engine === "postgres") {
    const [{ Pool }, { fromPg }] = await Promise.all([import("pg"), import("holdfast/pg")]);
    const pool = new Pool();
    return { hf: holdfast(fromPg(pool)), close: () => pool.end() };
  }
  if (engine === "sqlite") {
    const [{ DatabaseSync }, { fromNodeSqlite }] = await Promise.all([
      import("node:sqlite"),
      import("holdfast/node-sqlite"),
    ]);
    return { hf: holdfast(fromNodeSqlite(() => new DatabaseSync(":memory:"))), close: () => {} };
  }
  const [{ createPool }, { fromMysql2 }] = await Promise.all([
    import("mysql2/promise"),
    import("holdfast/mysql2"),
  ]);
  const pool = createPool({});
  return { hf: holdfast(fromMysql2(pool)), close: () => pool.end() };
}
