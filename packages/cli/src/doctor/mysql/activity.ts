/** Who holds, and who waits, at this moment. */
import { plural } from "../../text.ts";
import { setTimeout as sleep } from "node:timers/promises";
import type { Row } from "../../server.ts";
import { age } from "../../terminal.ts";
import { type Check, CouldNotLook, type Finding, findings, short } from "../check.ts";
import { type MysqlPatient, literal, needsProcess } from "./patient.ts";

type MysqlCheck = Check<MysqlPatient>;

const who = (row: Row): string => `session ${String(row["id"])} of ${String(row["user"])}`;

const kill = (id: unknown): string => `KILL ${String(id)};`;

/** Pairs of transactions, of which one waits for the other. */
async function waitsOf({ maria, ...patient }: MysqlPatient): Promise<string> {
  if (maria)
    return "(SELECT requesting_trx_id AS waiter, blocking_trx_id AS blocker FROM information_schema.innodb_lock_waits)";
  if ((await patient.settings()).get("performance_schema") !== "ON")
    throw new CouldNotLook(
      "who waits for whom is in performance_schema, which is OFF",
      "performance_schema = ON   # in my.cnf, under [mysqld]; needs a restart",
    );
  return "(SELECT requesting_engine_transaction_id AS waiter, blocking_engine_transaction_id AS blocker FROM performance_schema.data_lock_waits)";
}

const longTransactions: MysqlCheck = {
  id: "long-transactions",
  title: "a transaction has been at work for more than a minute",
  async run(patient) {
    await needsProcess(patient);
    const rows =
      await patient.look(`SELECT p.id, p.user, x.trx_query AS query, TIMESTAMPDIFF(SECOND, x.trx_started, NOW()) AS seconds
FROM information_schema.innodb_trx x JOIN information_schema.processlist p ON p.id = x.trx_mysql_thread_id
WHERE p.db = DATABASE() AND p.command <> 'Sleep' AND p.id <> CONNECTION_ID() AND x.trx_started < NOW() - INTERVAL 60 SECOND ORDER BY seconds DESC LIMIT 1000`);
    return findings(
      "warning",
      "Its locks are kept that long, and old versions of every row that changed since have to be kept for it: reads get slow.",
      rows.map((row) => ({
        what: `${who(row)}: ${age(Number(row["seconds"]) * 1000)}, now ${short(row["query"])}`,
        fix: kill(row["id"]),
      })),
    );
  },
};

/** One that keeps others waiting is found at once, else after ten seconds: a round trip of the application is shorter. */
const idleHolders: MysqlCheck = {
  id: "idle-holders",
  title: "a session is in a transaction and does nothing",
  async run(patient) {
    await needsProcess(patient);
    const waits = await waitsOf(patient);
    const idle = async (): Promise<Row[]> => {
      const rows =
        await patient.look(`SELECT p.id, p.user, p.time AS seconds, x.trx_id AS trx, x.trx_rows_locked AS locked,
  (SELECT COUNT(DISTINCT w.waiter) FROM ${waits} w WHERE w.blocker = x.trx_id) AS waiting
FROM information_schema.innodb_trx x JOIN information_schema.processlist p ON p.id = x.trx_mysql_thread_id
WHERE p.db = DATABASE() AND p.command = 'Sleep' AND p.time >= 1 ORDER BY seconds DESC LIMIT 1000`);
      return rows.filter((row) => Number(row["waiting"]) > 0 || Number(row["seconds"]) >= 10);
    };
    const first = await idle();
    if (first.length === 0) return [];
    // MySQL counts from the beginning of the last statement: after a long one, a session seems idle that is not.
    await sleep(1000);
    return (await idle())
      .filter((row) => first.some((before) => before["id"] === row["id"] && before["trx"] === row["trx"]))
      .map((row): Finding => {
        const waiting = Number(row["waiting"]);
        return {
          severity: waiting > 0 ? "error" : "warning",
          what: `${who(row)} is idle in a transaction for ${age(Number(row["seconds"]) * 1000)}, holds ${plural(Number(row["locked"]), "row lock")}${waiting > 0 ? `; ${plural(waiting, "session waits", "sessions wait")} for it` : ""}`,
          why: "Whatever it locked stays locked while it does nothing: a forgotten COMMIT, a call over the network inside of a transaction, or a frozen process.",
          fix: kill(row["id"]),
        };
      });
  },
};

const waiting: MysqlCheck = {
  id: "waits",
  title: "a session has been waiting for a row or a table for more than a second",
  async run(patient) {
    await needsProcess(patient);
    const waits = await waitsOf(patient);
    const why = "It holds a connection, and what it locked before, for as long as it waits.";
    const rows =
      await patient.look(`SELECT p.id, p.user, x.trx_query AS query, TIMESTAMPDIFF(SECOND, x.trx_wait_started, NOW()) AS seconds,
  (SELECT GROUP_CONCAT(DISTINCT b.trx_mysql_thread_id) FROM ${waits} w JOIN information_schema.innodb_trx b ON b.trx_id = w.blocker WHERE w.waiter = x.trx_id) AS blockers
FROM information_schema.innodb_trx x JOIN information_schema.processlist p ON p.id = x.trx_mysql_thread_id
WHERE p.db = DATABASE() AND x.trx_state = 'LOCK WAIT' AND x.trx_wait_started <= NOW() - INTERVAL 1 SECOND ORDER BY seconds DESC LIMIT 1000`);
    const tables =
      await patient.look(`SELECT p.id, p.user, p.time AS seconds, p.info AS query FROM information_schema.processlist p
WHERE p.db = DATABASE() AND p.state LIKE 'Waiting for table%lock' AND p.time >= 1 ORDER BY p.time DESC LIMIT 1000`);
    return [
      ...findings(
        "warning",
        why,
        rows.map((row) => {
          const blockers = String(row["blockers"] ?? "")
            .split(",")
            .filter(Boolean)
            .slice(0, 5);
          return {
            what: `${who(row)} waits for a row since ${age(Number(row["seconds"]) * 1000)}, behind session ${blockers.join(", ")}: ${short(row["query"], 50)}`,
            fix: blockers.map(kill).join("\n") || "holdfast locks",
          };
        }),
      ),
      ...findings(
        "warning",
        `${why} And everybody who comes to that table waits behind it.`,
        tables.map((row) => ({
          what: `${who(row)} waits for a table since ${age(Number(row["seconds"]) * 1000)}: ${short(row["query"], 50)}`,
          fix: kill(row["id"]),
        })),
      ),
    ];
  },
};

const namedLocks: MysqlCheck = {
  id: "named-locks",
  title: "a session has been waiting for GET_LOCK for more than a second",
  async run(patient) {
    await needsProcess(patient);
    const rows =
      await patient.look(`SELECT p.id, p.user, p.time AS seconds, p.info AS query FROM information_schema.processlist p
WHERE p.db = DATABASE() AND p.state = 'User lock' AND p.time >= 1 ORDER BY p.time DESC LIMIT 1000`);
    return findings(
      "warning",
      "A cycle of a named lock and a row lock is seen by nobody: it lasts until one of the two has waited long enough.",
      rows.map((row) => ({
        what: `${who(row)} waits for a named lock since ${age(Number(row["seconds"]) * 1000)}: ${short(row["query"])}`,
        fix: "holdfast locks   # who holds it",
      })),
    );
  },
};

/** The server does not tell since when: one that is there twice was left. */
const preparedTransactions: MysqlCheck = {
  id: "prepared-transactions",
  title: "a two-phase commit (XA) that nobody finishes",
  async run(patient) {
    const recover = async (): Promise<Map<string, Row>> =>
      new Map(
        (await patient.look("XA RECOVER CONVERT XID".replace(patient.maria ? " CONVERT XID" : "", ""))).map(
          (row) => [JSON.stringify(row), row],
        ),
      );
    const first = await recover();
    if (first.size === 0) return [];
    await sleep(1000);
    const left = [...(await recover())].filter(([key]) => first.has(key)).map(([, row]) => row);
    return findings(
      "error",
      "It keeps its row locks without any session, also over a restart, and no limit of time ends it.",
      left.map((row) => {
        const xid = xidOf(row, patient.maria);
        return {
          what: `prepared transaction ${xid}`,
          fix: `XA ROLLBACK ${xid};   -- or XA COMMIT, as its coordinator decided`,
        };
      }),
    );
  },
};

/** Both parts lie in one column. MySQL gives it in hexadecimal if asked to. */
function xidOf(row: Row, maria: boolean): string {
  const [first, format] = [Number(row["gtrid_length"]), String(row["formatid"])];
  const data = String(row["data"]);
  if (maria) return [literal(data.slice(0, first)), literal(data.slice(first)), format].join(", ");
  const hex = data.replace(/^0x/i, "");
  const part = (from: number, to?: number): string => `X'${hex.slice(from, to)}'`;
  return [part(0, first * 2), part(first * 2), format].join(", ");
}

export const activityChecks: readonly MysqlCheck[] = [
  idleHolders,
  longTransactions,
  waiting,
  namedLocks,
  preparedTransactions,
];
