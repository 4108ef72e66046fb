/** Holdfast's own tables and routines in a database. */
import type { Connection, Engine } from "./seam/database.ts";
import { UnsupportedError, UsageError } from "./seam/errors.ts";
import { checkNames } from "./input/options.ts";
import type { Migrated, RoutineState } from "./seam/routine.ts";
import type { Statement } from "./seam/sql.ts";
import type { Instance } from "./transaction/instance.ts";
import { withConnection } from "./transaction/one-shot.ts";
import { orNoTransactions } from "./transaction/present.ts";

export type MigrationState =
  | {
      readonly kind: "migration";
      readonly id: number;
      readonly name: string;
      readonly state: "applied" | "missing" | "unknown";
    }
  | { readonly kind: "routine"; readonly name: string; readonly state: RoutineState };

/** Another process may be at it, and an index takes its time. */
const migrateMs = 300_000;

/** Returns what was applied, and what was made. */
export async function applyMigrations<Native, C extends Connection>(
  context: Instance<Native, C>,
): Promise<Migrated[]> {
  const { engine, connect } = context.database;
  const applied = await withConnection(
    context,
    (connection) => engine.migrations.apply(connection, connect === undefined),
    migrateMs,
  ).catch(async (error: unknown) => {
    throw await orNoTransactions(context, error);
  });
  return applied.map((each): Migrated =>
    "was" in each
      ? { kind: "routine", name: each.name, was: each.was }
      : { kind: "migration", id: each.id, name: each.name },
  );
}

export async function migrationStates<Native, C extends Connection>(
  context: Instance<Native, C>,
): Promise<readonly MigrationState[]> {
  const { all, applied, routines } = context.database.engine.migrations;
  const [there, made] = await withConnection(context, async (connection) => [
    await applied(connection),
    (await routines?.states(connection)) ?? new Map<string, RoutineState>(),
  ]);
  const found = new Map(there.map(({ id, name }) => [id, name]));
  const kind = "migration";
  const known = all.map(({ id, name }): MigrationState => {
    const state = found.delete(id) ? "applied" : "missing";
    return { kind, id, name, state };
  });
  return [
    ...known,
    ...[...found].map(([id, name]): MigrationState => ({ kind, id, name, state: "unknown" })),
    ...[...made].map(([name, state]): MigrationState => ({ kind: "routine", name, state })),
  ];
}

/** What is printed of them. */
export interface MigrationSqlOptions {
  readonly from?: number;
  readonly only?: "tables" | "routines";
}

export function migrationSql<C extends Connection>(
  migrations: Engine<C>["migrations"],
  options: MigrationSqlOptions,
): string {
  checkNames("hf.migrationSql", options, new Set(["from", "only"]));
  const { from = 1, only } = options;
  if (!Number.isSafeInteger(from)) throw new UsageError("hf.migrationSql: from must be a whole number");
  if (only !== undefined && only !== "tables" && only !== "routines")
    throw new UsageError('hf.migrationSql: only must be "tables" or "routines"');
  const { all, routines } = migrations;
  const part = (title: string, statements: readonly Statement[]) =>
    `-- holdfast ${title}\n${statements.map(migrations.print).join("\n")}\n`;
  const tables = all
    .filter(({ id }) => id >= from && only !== "routines")
    .map((each) => part(`${each.id}: ${each.name}`, [...each.statements, migrations.record(each)]));
  const made = (only !== "tables" && routines?.all) || [];
  const parts = [...tables, ...made.map((each) => part(`routine: ${each.name}`, routines?.make(each) ?? []))];
  const [before, after] = migrations.frame ?? [];
  if (parts.length === 0 || !before || !after) return parts.join("\n");
  return [part("begins, in one transaction", [before]), ...parts, part("ends", [after])].join("\n");
}

export function grantSql<C extends Connection>(
  { rights }: Engine<C>["migrations"],
  options: { readonly role: string },
): string {
  checkNames("hf.grantSql", options, new Set(["role"]));
  const { role } = options;
  if (typeof role !== "string" || role === "" || role.includes("\0") || !role.isWellFormed())
    throw new UsageError("hf.grantSql: role must be the name of a role");
  if (!rights)
    throw new UnsupportedError(
      "hf.grantSql: this database has no roles, so there is nothing to grant: whoever can open it may do everything",
    );
  return `-- holdfast: what a role needs to use every pattern and lock\n${rights.grants(role).join(";\n")};\n`;
}
