/** Which tables statements can have written, beyond those that they name. */
import type { SqlConnection } from "../../../seam/database.ts";
import { sql } from "../../../seam/sql.ts";
import type { WrittenTables } from "../../../seam/protocol-reader.ts";

export interface Relation {
  readonly oid: string;
  readonly schema: string;
  readonly name: string;
}

interface Known extends Relation {
  /** The one that a name without a schema means, in this session. */
  readonly visible: boolean;
  /** A view, or a table with triggers or rules: what is written to it may end up anywhere. */
  readonly anywhere: boolean;
}

export class RelationReach {
  readonly #byOid: ReadonlyMap<string, Known>;
  readonly #byName: ReadonlyMap<string, readonly Known[]>;
  /** Partitions and heirs, and those that foreign keys change along. */
  readonly #along: ReadonlyMap<string, readonly string[]>;
  /** Names of functions that may write. */
  readonly #writers: ReadonlySet<string>;

  constructor(
    relations: readonly Known[],
    along: readonly { readonly from: string; readonly to: string }[],
    writers: ReadonlySet<string>,
  ) {
    this.#byOid = new Map(relations.map((each) => [each.oid, each]));
    this.#byName = Map.groupBy(relations, ({ name }) => name.toLowerCase());
    this.#along = new Map(
      [...Map.groupBy(along, ({ from }) => from)].map(([from, all]) => [from, all.map(({ to }) => to)]),
    );
    this.#writers = writers;
  }

  /** In a transaction whose path is safe. `path`: the schemas of the session's own path, in their order. */
  static async of(connection: SqlConnection, path: readonly string[]): Promise<RelationReach> {
    const relations = await connection.query(sql`
      SELECT c.oid::text AS oid, n.nspname AS schema, c.relname AS name,
        c.relkind NOT IN ('r', 'p')
          OR EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = c.oid AND NOT t.tgisinternal AND t.tgenabled <> 'D')
          OR EXISTS (SELECT FROM pg_rewrite r WHERE r.ev_class = c.oid) AS anywhere
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
      WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND c.relpersistence <> 't'
        AND n.nspname <> 'information_schema' AND n.nspname !~ '^pg_'`);
    const along = await connection.query(sql`
      SELECT inhparent::text AS from, inhrelid::text AS to FROM pg_inherits
      UNION SELECT confrelid::text, conrelid::text FROM pg_constraint WHERE contype = 'f'
        AND (confdeltype IN ('c', 'n', 'd') OR confupdtype IN ('c', 'n', 'd'))`);
    // Those that may not write say so by being stable or immutable. Of extensions, these two only calculate.
    const writers = await connection.query(sql`
      SELECT DISTINCT lower(p.proname) AS name FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
      WHERE p.provolatile = 'v' AND p.prokind IN ('f', 'p', 'w') AND n.nspname NOT IN ('pg_catalog', 'information_schema')
        AND NOT EXISTS (SELECT FROM pg_depend d JOIN pg_extension e ON e.oid = d.refobjid
          WHERE d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.refclassid = 'pg_extension'::regclass
            AND e.extname IN ('uuid-ossp', 'pgcrypto'))`);
    const found = relations.rows.map((row) => ({
      oid: String(row["oid"]),
      schema: String(row["schema"]),
      name: String(row["name"]),
      anywhere: row["anywhere"] === true,
    }));
    const byName = Map.groupBy(found, ({ name }) => name);
    const schemaOf = (name: string) =>
      path.find((schema) => byName.get(name)?.some((each) => each.schema === schema));
    return new RelationReach(
      found.map((each) => ({ ...each, visible: each.schema === schemaOf(each.name) })),
      along.rows.map((row) => ({ from: String(row["from"]), to: String(row["to"]) })),
      new Set(writers.rows.map((row) => String(row["name"]))),
    );
  }

  /** Tables by their numbers. */
  of({ anything, tables, calls }: WrittenTables): ReadonlySet<string> | "anything" {
    if (anything || [...calls].some((call) => this.#writers.has(call))) return "anything";
    const found = new Set<string>();
    for (const name of tables) {
      const meant = this.#meant(name);
      if (meant === "anything") return meant;
      for (const { oid } of meant) found.add(oid);
    }
    // Grows while it is gone through.
    for (const oid of found) for (const other of this.#along.get(oid) ?? []) found.add(other);
    return [...found].some((oid) => this.#byOid.get(oid)?.anywhere) ? "anything" : found;
  }

  /** Nobody's: a temporary one, or a name that stands for something else in the statement. */
  #meant(name: string): readonly Known[] | "anything" {
    const [table = "", schema] = name.split(".").toReversed();
    const all = this.#byName.get(table) ?? [];
    if (schema !== undefined) return all.filter((each) => each.schema.toLowerCase() === schema);
    const visible = all.filter((each) => each.visible);
    // Another session may look elsewhere first.
    return visible.length === 0 && all.length > 0 ? "anything" : visible;
  }
}
