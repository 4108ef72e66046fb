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
  /** Given to nodes of Citus: so many schemas. */
  readonly citus?: true;
  readonly places?: number;
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

export interface GrantsOptions {
  readonly url?: string;
  readonly schema?: string;
  readonly engine?: Kind | "duckdb";
  readonly role: string;
  readonly citus?: true;
  readonly places?: number;
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
  if (options.citus) return migratePlaces(options);
  refusePlaces(options);
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

function refusePlaces({ citus, places }: MigrateOptions): void {
  if (!citus && places !== undefined)
    throw new Failure("--places is for --citus: so many schemas, each on one of its nodes.");
}

/** Where a schema is, as host and port. */
const whereIs = `SELECT DISTINCT s.nodename || ':' || s.nodeport AS node FROM citus_shards s
  JOIN pg_class c ON c.oid = s.table_name::oid JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $1`;

async function migratePlaces(options: MigrateOptions): Promise<void> {
  const schemas = await schemasOf(options);
  const [first] = schemas as [string, ...string[]];
  const at = (schema: string) => ({ ...options, schema, spread: true }) as const;
  const wanted = await onServer("migrate", at(first), async (server) => {
    const [found] = await server.query(
      "SELECT to_regclass('pg_catalog.pg_dist_schema') IS NOT NULL AS citus",
    );
    if (found?.["citus"] !== true)
      throw new Failure(
        `${server.shown} is no Citus, or one before version 12. Without --citus the tables come into one schema.`,
      );
    const names = schemas.length === 1 ? first : `${first} to ${schemas.at(-1)}`;
    note(
      `To be made or updated in ${server.shown}: ${plural(schemas.length, "schema")} (${names}), each with all tables, on one node of Citus.`,
    );
    return agreed(`Make or update ${plural(schemas.length, "schema")}?`, options);
  });
  if (!wanted) return;
  const places: { schema: string; node: string; applied: readonly Migrated[] }[] = [];
  for (const schema of schemas)
    await onServer("migrate", at(schema), async (server) => {
      const applied = await apply(server, await server.hf.migrations(), options);
      const [row] = await server.query(whereIs, [schema]);
      places.push({ schema, node: String(row?.["node"]), applied });
      note(`${places.length} of ${schemas.length}: ${schema}`);
    });
  if (options.json) {
    printJson({ places });
    return;
  }
  printTable(
    ["schema", "node", "applied"],
    places.map(({ schema, node, applied }) => [
      schema,
      node,
      applied.length === 0 ? "nothing to do" : counted(applied),
    ]),
  );
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

/** No connection is made. */
export async function printGrants(options: GrantsOptions): Promise<void> {
  const { role, citus, json } = options;
  const engine = options.engine ?? engineOf(options.url);
  if (engine === "sqlite" || engine === "duckdb")
    throw new Failure(
      `${engine === "sqlite" ? "SQLite" : "DuckDB"} has no roles, so there is nothing to grant: a process that can open the file may do everything. Keep others away by the file's own permissions.`,
    );
  refusePlaces(options);
  if (citus && engine !== "postgres") throw new Failure("--citus is for PostgreSQL.");
  const schemas = await schemasOf(options);
  const parts: string[] = [];
  for (const schema of schemas) {
    const { hf, close } = await unconnected(engine, { schema }, citus);
    try {
      parts.push(hf.grantSql({ role }));
    } finally {
      await hf.close();
      await close();
    }
  }
  const sql = parts.join("");
  if (json) printJson({ engine, role, sql });
  else print(sql.trimEnd());
}

async function schemasOf({ schema, citus, places = 8 }: MigrateOptions): Promise<readonly string[]> {
  if (!citus) return [givenSchema(schema)];
  const { placeNames } = await import("holdfast/citus");
  return placeNames(places, givenSchema(schema));
}

function engineOf(url: string | undefined): Kind {
  const found = given(url);
  if (!found) throw new Failure("SQL for which database? Name it with --engine, or with --url.");
  return kindOf(found);
}

async function unconnected(
  engine: Kind,
  settings: HoldfastOptions,
  spread = false,
): Promise<{ readonly hf: Holdfast<unknown>; close(): Promise<unknown> | void }> {
  if (engine === "postgres") {
    const [{ Pool }, { fromPg }, { fromCitus }] = await Promise.all([
      import("pg"),
      import("holdfast/pg"),
      import("holdfast/citus"),
    ]);
    const pool = new Pool();
    const database = spread ? fromCitus(fromPg(pool)) : fromPg(pool);
    return { hf: holdfast(database, settings), close: () => pool.end() };
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
