/** What a user or role needs that uses every pattern and lock. Procedures run with the rights of their caller. */
import type { Rights, SqlConnection } from "../../seam/database.ts";
import { type Right, each, listed, onTables } from "../../seam/rights.ts";
import { type Names, sql } from "../../seam/sql.ts";
import { numberSequences } from "../sql/dialect.ts";
import { dialect } from "./dialect.ts";
import type { Procedure } from "./routines.ts";
import { counterOf } from "./store-dialect.ts";

/** INSERT … ON DUPLICATE KEY UPDATE needs UPDATE as well. */
const tables: readonly Right[] = [
  onTables("SELECT", "migration origin"),
  onTables("SELECT, INSERT", "stock_movement"),
  onTables(
    "SELECT, INSERT, UPDATE",
    "audit lock queue quota_bucket resource schedule seen stock_level stock_reservation",
  ),
  onTables(
    "SELECT, INSERT, DELETE",
    "once queue_delayed queue_grouped queue_ready quota_hold stock_reserved",
    ...numberSequences.map(counterOf),
  ),
  onTables(
    "SELECT, INSERT, UPDATE, DELETE",
    "committed exec_run grip lease schedule_run quota_grant quota_line",
    "queue_failed queue_group queue_key queue_lease queue_mark queue_worker",
  ),
];

export const tableNames: readonly string[] = tables.flatMap(({ names }) => names);

/** "app" or "app@host": MariaDB takes the first for a role, if there is one. In backticks nothing but these has to be doubled. */
function grantee(role: string): string {
  const [, name = role, host] = /^(.*)@([^@]*)$/s.exec(role) ?? [];
  return host === undefined ? dialect.quote(name) : `${dialect.quote(name)}@${dialect.quote(host)}`;
}

export function rightsIn(names: Names, procedures: readonly Procedure[]): Rights<SqlConnection> {
  const all: readonly Right[] = [
    ...tables,
    { kind: "routine", privileges: ["EXECUTE"], names: procedures.map(({ plain }) => plain) },
  ];
  return {
    // One thing each, in the database that is in use.
    grants: (role) =>
      all.flatMap(({ kind, privileges, names: things }) =>
        things.map(
          (name) =>
            `GRANT ${privileges.join(", ")} ON ${kind === "routine" ? "PROCEDURE " : ""}${names.own(name)} TO ${grantee(role)}`,
        ),
      ),
    async lacking(connection) {
      // What roles give is in these, too.
      const { rows: columns } = await connection.query(
        sql`SELECT table_name AS name, MAX(LOWER(privileges)) AS privileges FROM information_schema.columns WHERE table_schema = DATABASE() GROUP BY table_name`,
      );
      const { rows: routines } = await connection.query(
        sql`SELECT routine_name AS name FROM information_schema.routines WHERE routine_schema = DATABASE()`,
      );
      const given = new Map(
        columns.map((row) => [String(row["name"]), String(row["privileges"]).split(",")]),
      );
      const called = new Set(routines.map((row) => String(row["name"])));
      const has = async (name: string, privilege: string): Promise<boolean> => {
        if (privilege === "EXECUTE") return called.has(name);
        const mine = given.get(name);
        if (!mine || privilege !== "DELETE") return mine?.includes(privilege.toLowerCase()) ?? false;
        // Columns do not tell of it. It deletes nothing, and is refused like a DELETE.
        const explained = connection.query(sql.raw(`EXPLAIN DELETE FROM ${name} WHERE 1 = 0`));
        return explained.then(
          () => true,
          () => false,
        );
      };
      const lacks: { privilege: string; name: string }[] = [];
      for (const { name, privilege } of [...each(all, "table"), ...each(all, "routine")])
        if (!(await has(names.own(name), privilege))) lacks.push({ privilege, name: names.own(name) });
      return listed(lacks);
    },
  };
}
