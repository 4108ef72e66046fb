/** The audit on any engine: a table of lines, with ids that grow. */
import type { Audits, WrittenLine } from "../../audit/store.ts";
import type { SqlConnection } from "../../seam/database.ts";
import { SchemaMissingError } from "../../seam/errors.ts";
import { sql } from "../../seam/sql.ts";
import type { How } from "../../seam/store.ts";
import type { StoreDialect } from "./dialect.ts";
import { StoredRows } from "./rows.ts";
import { type Table, table } from "./table.ts";

export const auditTable = table({
  name: "audit",
  columns: {
    id: "integer",
    at: "moment",
    actor: "text",
    action: "text",
    target: "text",
    details: "json?",
    outcome: "text",
    result: "json?",
    error: "text?",
    ended_at: "moment?",
  },
  key: ["id"],
  indexes: [["target", "id"]],
});

export const auditTables: readonly Table[] = [auditTable];

const parsed = (json: string | undefined): unknown => (json === undefined ? undefined : JSON.parse(json));

/** The store over an engine's dialect: `audits: auditStore(dialect)`. */
export function auditStore<C extends SqlConnection>(dialect: StoreDialect<C>): Audits<C> {
  const rows = new StoredRows(dialect);

  async function explained<T>(connection: C, work: () => Promise<T>): Promise<T> {
    try {
      return await work();
    } catch (error) {
      if (dialect.failure(connection, error) === "schema-missing")
        throw new SchemaMissingError("The table of the audit", error);
      throw error;
    }
  }

  const within = <T>(connection: C, { free, waitMs }: How, work: () => Promise<T>): Promise<T> =>
    free ? dialect.transaction(connection, waitMs, work) : dialect.inside(connection, waitMs, work);

  return {
    begin(connection, { actor, action, target, details }, how) {
      const work = async () => {
        const [id] = (await dialect.numbers(connection, "audit", 1)) as [number];
        const at = await rows.clock(connection);
        const line = { id, at, actor, action, target, details: parsed(details), outcome: "begun" };
        await rows.insertMissing(connection, auditTable, [line]);
        return id;
      };
      return explained(connection, () => within(connection, how, work));
    },

    end(connection, id, { outcome, result, error }, how) {
      const work = async () => {
        const ended = { outcome, result: parsed(result), error, ended_at: await rows.clock(connection) };
        await rows.update(connection, auditTable, rows.is(auditTable, "id", id), ended);
      };
      return explained(connection, () => within(connection, how, work));
    },

    list(connection, { before, target, most }) {
      const below = before === undefined ? sql`1 = 1` : rows.compare(auditTable, "id", "<", before);
      const about = target === undefined ? sql`1 = 1` : rows.is(auditTable, "target", target);
      return explained(connection, async () => {
        const found = await rows.select(connection, auditTable, sql`${below} AND ${about}`, {
          order: sql.raw("id DESC"),
          limit: most,
        });
        return found.map(({ ended_at: ended, at, outcome, ...line }): WrittenLine => ({
          ...line,
          outcome: outcome as WrittenLine["outcome"],
          at: at / 1000,
          ended: ended === undefined ? undefined : ended / 1000,
        }));
      });
    },
  };
}
