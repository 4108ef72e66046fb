/** What the server has counted, and how much room is left. */
import { plural } from "../../text.ts";
import { age } from "../../terminal.ts";
import { type Check, CouldNotLook, type Finding, findings } from "../check.ts";
import { type MysqlPatient, name, needsProcess } from "./patient.ts";
import { sessions } from "./sessions.ts";

type MysqlCheck = Check<MysqlPatient>;

const connections: MysqlCheck = {
  id: "connections",
  title: "more than 80 % of the connections are in use",
  async run(patient) {
    const used = Number((await patient.status()).get("threads_connected"));
    const cap = Number((await patient.settings()).get("max_connections"));
    const share = used / cap;
    if (share < 0.8) return [];
    return [
      {
        severity: share >= 0.95 ? "error" : "warning",
        what: `${used} of ${cap} connections (max_connections) are in use`,
        why: "Whoever waits for a lock keeps its connection. A few more waiters, and nobody gets one, not even the holder's next step.",
        fix: `SET ${patient.maria ? "GLOBAL" : "PERSIST"} max_connections = ${cap * 2};   -- or smaller pools`,
      },
    ];
  },
};

/** InnoDB's have no fixed size: they take room in memory, and are looked through. */
const lockTable: MysqlCheck = {
  id: "lock-table",
  title: "a transaction holds more than 100,000 row locks",
  async run(patient) {
    const rows = (await sessions(patient))
      .map(({ id, transaction }) => ({
        id,
        locked: transaction?.locked ?? 0,
        bytes: transaction?.bytes ?? 0,
      }))
      .filter(({ locked }) => locked > 100_000)
      .toSorted((a, b) => b.locked - a.locked);
    return findings(
      "warning",
      "A statement without a fitting index locks every row that it reads; nobody else can change any of them until its end.",
      rows.map((row) => ({
        what: `session ${row.id} holds ${plural(row.locked, "row lock")} (${Math.round(row.bytes / 1024).toLocaleString("en")} kB)`,
        fix: `KILL ${row.id};`,
      })),
    );
  },
};

/** A few in a week are normal life where transactions are retried. */
const deadlocks: MysqlCheck = {
  id: "deadlocks",
  title: "more than ten deadlocks a day (and at least 5)",
  async run(patient) {
    const status = await patient.status();
    let count = Number(status.get("innodb_deadlocks") ?? Number.NaN);
    if (Number.isNaN(count)) {
      await needsProcess(patient);
      const [row] = await patient.look(
        "SELECT count AS n FROM information_schema.innodb_metrics WHERE name = 'lock_deadlocks'",
      );
      count = Number(row?.["n"]);
    }
    const ms = Number(status.get("uptime")) * 1000;
    if (count < 5 || (count / ms) * 86_400_000 <= 10) return [];
    return [
      {
        severity: "warning",
        what: `${plural(count, "deadlock")} in ${age(ms)}, of all databases`,
        why: "Transactions take the same locks in different orders, or lock gaps under REPEATABLE READ: the work of one is undone and done again.",
        fix: "hf.transaction({ lock: [keyA, keyB] }, …)   // all keys in one call are taken in one order; or tx.rows for rows",
      },
    ];
  },
};

const fullScans: MysqlCheck = {
  id: "seq-scans",
  title: "a big table is read in full, again and again: a query that should lock one row has no index",
  async run(patient) {
    if ((await patient.settings()).get("performance_schema") !== "ON")
      throw new CouldNotLook(
        "how tables are read is counted by performance_schema, which is OFF",
        "performance_schema = ON   # in my.cnf, under [mysqld]; needs a restart",
      );
    const rows = await patient.look(`SELECT i.object_name AS name, i.count_read AS seen, t.table_rows AS n
FROM performance_schema.table_io_waits_summary_by_index_usage i JOIN information_schema.tables t ON t.table_schema = i.object_schema AND t.table_name = i.object_name
WHERE i.object_schema = DATABASE() AND i.index_name IS NULL AND t.table_rows > 10000 AND i.count_read > t.table_rows * 1000 ORDER BY i.count_read DESC LIMIT 1000`);
    return findings(
      "hint",
      "SELECT … FOR UPDATE, UPDATE or DELETE by a column without an index locks every row of the table, not the one that it is about.",
      rows.map((row) => ({
        what: `${name(String(row["name"]))}: ${Number(row["seen"]).toLocaleString("en")} rows read without an index, of ${Number(row["n"]).toLocaleString("en")}`,
        fix: `CREATE INDEX … ON ${name(String(row["name"]))} (…);   -- the columns of the WHERE; SELECT * FROM sys.statements_with_full_table_scans tells which query`,
      })),
    );
  },
};

const bloat: MysqlCheck = {
  id: "queue-bloat",
  title: "old versions of rows are not cleaned up, or Holdfast's own tables have grown",
  async run(patient) {
    const found: Finding[] = [];
    const rows = await patient.look(
      "SELECT table_name AS name, table_rows AS n FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = ? AND table_rows > 1000000",
      [patient.server.own("lock")],
    );
    for (const row of rows)
      found.push({
        severity: "hint",
        what: `${patient.server.own("lock")} has some ${Number(row["n"]).toLocaleString("en")} rows`,
        why: "One stays for each key that was ever locked: keys that are made of ids of requests or of times fill it.",
        fix: `DELETE FROM ${patient.server.own("lock")};   -- while no transaction of Holdfast and no hold is under way`,
      });
    let history = Number((await patient.status()).get("innodb_history_list_length") ?? Number.NaN);
    if (Number.isNaN(history)) {
      await needsProcess(patient);
      const [row] = await patient.look(
        "SELECT count AS n FROM information_schema.innodb_metrics WHERE name = 'trx_rseg_history_len'",
      );
      history = Number(row?.["n"]);
    }
    if (history > 100_000)
      found.push({
        severity: "warning",
        what: `InnoDB's history list has ${history.toLocaleString("en")} entries`,
        why: "Old versions of rows wait to be cleaned up, most likely for a transaction that is open: queues and counters get slow to read.",
        fix: "SELECT trx_mysql_thread_id, trx_started FROM information_schema.innodb_trx ORDER BY trx_started LIMIT 5;   -- and KILL the oldest",
      });
    return found;
  },
};

export const loadChecks: readonly MysqlCheck[] = [connections, lockTable, deadlocks, fullScans, bloat];
