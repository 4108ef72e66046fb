/** What all processes must have in common: whether it can be seen, and whether somebody left it half changed. */
import { age } from "../../terminal.ts";
import { schemaIn } from "../../server.ts";
import { shown } from "../../text.ts";
import type { Check, Finding } from "../check.ts";
import { type PostgresPatient, name } from "./patient.ts";

export const agreedCheck: Check<PostgresPatient> = {
  id: "strategy",
  title: "how locks are kept is not seen by this user, or was left half changed",
  async run(patient): Promise<Finding[]> {
    const { own } = patient.server;
    const [table] = await patient.look(
      `SELECT has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT') AS seen,
  has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'INSERT') AS writes
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $1 AND c.relname = 'agreed'`,
      [patient.server.schema],
    );
    if (!table) return [];
    const role = name(patient.me.role);
    if (table["seen"] !== true)
      return [
        {
          severity: "warning",
          what: `${shown(patient.me.role)} may not read ${own("agreed")}`,
          why: "It says how locks are kept, and which shard this is. Without it, locks and patterns are refused (HF_ACCESS_DENIED).",
          fix: `GRANT USAGE ON SCHEMA ${schemaIn(patient.server)} TO ${role};\nGRANT SELECT, INSERT ON ${own("agreed")} TO ${role};`,
        },
      ];
    const rows = await patient.look(
      `SELECT name, value, next, extract(epoch FROM clock_timestamp() - since) * 1000 AS ms FROM ${own("agreed")}`,
    );
    const strategy = rows.find((row) => row["name"] === "strategy");
    if (!strategy && table["writes"] !== true)
      return [
        {
          severity: "warning",
          what: `how locks are kept is not written down, and ${shown(patient.me.role)} may not`,
          why: "Processes that keep them in different ways do not exclude each other, and nobody refuses them.",
          fix: `GRANT INSERT ON ${own("agreed")} TO ${role};`,
        },
      ];
    if (typeof strategy?.["next"] !== "string") return [];
    return [
      {
        severity: "error",
        what: `locks are being changed from "${shown(String(strategy["value"]))}" to "${shown(strategy["next"])}", since ${age(Number(strategy["ms"]))}`,
        why: "Nobody gets a lock until that is over (HF_STRATEGY). It takes about half a minute: after that, whoever did it was stopped.",
        fix: `holdfast strategy set "${shown(String(strategy["value"]))}"`,
      },
    ];
  },
};
