/** What is at the other end of the connection, and what stands between. */
import { randomBytes } from "node:crypto";
import type { Session } from "../../server.ts";
import type { Check, Finding } from "../check.ts";
import { clockSkew } from "../clock.ts";
import { writableReplica } from "../replica.ts";
import type { MysqlPatient } from "./patient.ts";

type MysqlCheck = Check<MysqlPatient>;

/** As in docs/engines/mysql.md. */
const version: MysqlCheck = {
  id: "version",
  title: "MySQL is older than 8.0.36, MariaDB older than 10.6",
  async run({ maria, version: found }) {
    const [major = 0, minor = 0, patch = 0] = found.split(/[.-]/, 3).map(Number);
    const [product, least, last, fix] = maria
      ? (["MariaDB", 10, 6, 0] as const)
      : (["MySQL", 8, 0, 36] as const);
    if (major > least || (major === least && (minor > last || (minor === last && patch >= fix)))) return [];
    return [
      {
        severity: "error",
        what: `the server is ${product} ${found}`,
        why: "Holdfast refuses it: SKIP LOCKED is missing before, or nobody has tried it.",
        fix: `Upgrade the server to ${product} ${least}.${last}${fix > 0 ? `.${fix}` : ""} or newer.`,
      },
    ];
  },
};

const lookAlike: MysqlCheck = {
  id: "look-alike",
  title: "a server that speaks MySQL's protocol and locks differently (Vitess, TiDB, SingleStore…)",
  async run({ full }) {
    const found = /vitess|planetscale|tidb|singlestore|memsql|oceanbase|starrocks|doris|clickhouse/i.exec(
      full,
    )?.[0];
    if (found === undefined) return [];
    return [
      {
        severity: "error",
        what: `the server is ${found}: ${full.trim()}`,
        why: "GET_LOCK is missing, given up after some seconds, or locks on one node only: hf.hold is refused on Vitess, and other look-alikes are not known.",
        fix: "Use a MySQL or MariaDB for what has to be exact, or lock by rows only: hf.transaction({ lock: key }, …).",
      },
    ];
  },
};

const galera: MysqlCheck = {
  id: "galera",
  title: "the server is a node of a Galera cluster",
  async run(patient) {
    const settings = await patient.settings();
    if (settings.get("wsrep_on") !== "ON") return [];
    return [
      {
        severity: "warning",
        what: `wsrep_on is ON (cluster ${settings.get("wsrep_cluster_name") ?? "of no name"})`,
        why: "GET_LOCK and row locks hold on one node only. Of two writers on different nodes one fails at COMMIT (1213) and has to run again. Holdfast refuses hf.hold, hf.tryLock, row locks, leases and SERIALIZABLE here, also if all writes go to one node.",
        fix: "hf.transaction({ lock: key(…) }, …)   // exact: who commits second is run again by itself; so are versions and once\nSend those who want the same key to one node (ProxySQL: one writer; MaxScale: readwritesplit), so that they wait for each other.",
      },
    ];
  },
};

const group: MysqlCheck = {
  id: "group-replication",
  title: "the server is a member of a group (Group Replication) with several primaries",
  async run(patient) {
    const settings = await patient.settings();
    if (!/^(?:OFF|0)$/.test(settings.get("group_replication_single_primary_mode") ?? "")) return [];
    return [
      {
        severity: "error",
        what: `group_replication_single_primary_mode is OFF (group ${settings.get("group_replication_group_name") || "of no name"})`,
        why: "Locks hold on one member only. A transaction that the server undoes for another member's sake can go on without a word, and its second half is committed. Holdfast refuses every lock here; versions are exact.",
        fix: "SELECT group_replication_switch_to_single_primary_mode();",
      },
    ];
  },
};

const advisoryLocks: MysqlCheck = {
  id: "advisory-locks",
  title: "GET_LOCK does not exclude (tried with two sessions on a random name)",
  async run(patient) {
    await using a = await patient.session();
    await using b = await patient.session();
    const lock = `holdfast_doctor_${randomBytes(8).toString("hex")}`;
    const take = async (session: Session): Promise<unknown> =>
      (await session.query("SELECT GET_LOCK(?, 0) AS taken", [lock]))[0]?.["taken"];
    const why = "hf.hold, and every tool that relies on GET_LOCK, lets two in at once.";
    const fix =
      "hf.transaction({ lock: key(…) }, …)   // rows of a table lock everywhere; hf.lease for work that is longer";
    try {
      const [first, second] = [String(await take(a)), String(await take(b))];
      if (first === "1" && second === "0") return [];
      return [
        {
          severity: "error",
          what: `of two sessions that want one name, GET_LOCK told ${first} and ${second}`,
          why,
          fix,
        },
      ];
    } catch (error) {
      const { errno, message } = error as { errno?: unknown; message?: unknown };
      // Not supported yet; no such function; denied by the cluster.
      if (errno !== 1235 && errno !== 1305 && errno !== 1047 && errno !== 1105) throw error;
      return [{ severity: "error", what: `GET_LOCK is refused: ${String(message)}`, why, fix }];
    } finally {
      await a.query("DO RELEASE_LOCK(?)", [lock]).catch(() => {});
      await b.query("DO RELEASE_LOCK(?)", [lock]).catch(() => {});
    }
  },
};

const replica: MysqlCheck = {
  id: "replica",
  title: "the server is a replica, or read-only",
  async run(patient) {
    const settings = await patient.settings();
    const closed = ["read_only", "super_read_only", "innodb_read_only"].filter((setting) =>
      /^(?:ON|1)$/.test(settings.get(setting) ?? ""),
    );
    const found: Finding[] = [];
    if (closed.length > 0)
      found.push({
        severity: "error",
        what: `${closed.join(", ")} ${closed.length === 1 ? "is" : "are"} ON`,
        why: "What is locked here is not locked on the primary, and what is read is older than what is there. Holdfast refuses it (HF_REPLICA).",
        fix: "Connect to the primary. If this is the primary:\nSET GLOBAL read_only = OFF;",
      });
    if (/^(?:ON|1)$/.test(settings.get("transaction_read_only") ?? settings.get("tx_read_only") ?? ""))
      found.push({
        severity: "error",
        what: "transaction_read_only is ON",
        why: "Every write fails with 1792: the check runs, the write does not.",
        fix: `SET GLOBAL ${patient.maria ? "tx_read_only" : "transaction_read_only"} = OFF;`,
      });
    if (closed.length > 0) return found;
    const fed = await writableReplica(patient.server);
    // Without the right to ask nobody is sure: then this throws, and the report says so.
    if (fed.length === 0) await patient.look("SHOW REPLICA STATUS");
    return [...found, ...fed];
  },
};

/** A proxy that shares connections out per statement or transaction: the id of the session moves while another one is in a transaction. */
const pooler: MysqlCheck = {
  id: "pooler",
  title: "a proxy lends sessions out per transaction (tried with two sessions)",
  async run(patient) {
    await using a = await patient.session();
    await using b = await patient.session();
    // With a variable of the session, which a proxy that knows of it would keep the session for, nothing is shown.
    const id = async (session: Session): Promise<string> =>
      String((await session.query("SELECT CONNECTION_ID() AS id"))[0]?.["id"]);
    for (let round = 0; round < 5; round++) {
      const before = await id(a);
      await b.query("START TRANSACTION READ ONLY");
      try {
        const inside = await id(b);
        const after = await id(a);
        if (before === after && inside !== before) continue;
        return [
          {
            severity: "warning",
            what: "a proxy stands between: while one session was in a transaction, another one changed its connection",
            why: "GET_LOCK (hf.hold) and session variables stay behind on a connection that others get next.",
            fix: "Connect to the server itself for these; ProxySQL:\nUPDATE mysql_users SET transaction_persistent = 1; SET mysql-multiplexing = 'false'; LOAD MYSQL USERS TO RUNTIME; LOAD MYSQL VARIABLES TO RUNTIME;",
          },
        ];
      } finally {
        await b.query("ROLLBACK");
      }
    }
    return [];
  },
};

const rights: MysqlCheck = {
  id: "rights",
  title: "the user may not see what sessions of others do",
  async run(patient) {
    const missing: string[] = [];
    if (!(await patient.process())) missing.push(`GRANT PROCESS ON *.* TO ${patient.user};`);
    const on = (await patient.settings()).get("performance_schema") === "ON";
    if (on && !patient.maria)
      try {
        await patient.look("SELECT 1 FROM performance_schema.data_lock_waits LIMIT 1");
      } catch (error) {
        if ((error as { errno?: unknown }).errno !== 1142) throw error;
        missing.push(`GRANT SELECT ON performance_schema.* TO ${patient.user};`);
      }
    if (missing.length === 0) return [];
    return [
      {
        severity: "hint",
        what: `${patient.user} lacks ${missing.length === 2 ? "PROCESS and SELECT on performance_schema" : missing[0]?.includes("PROCESS") ? "PROCESS" : "SELECT on performance_schema"}`,
        why: "hf.inspect() and a lock timeout cannot say who held the lock, and some checks here could not look.",
        fix: missing.join("\n"),
      },
    ];
  },
};

const database: MysqlCheck = {
  id: "database",
  title: "no database is selected",
  async run(patient) {
    if (patient.database !== "") return [];
    return [
      {
        severity: "error",
        what: "no database is selected",
        why: "Holdfast refuses it, since its lock rows are tables of a database; and nothing could be said about yours.",
        fix: "mysql://user@host/database",
      },
    ];
  },
};

const clock: MysqlCheck = clockSkew(async (patient) =>
  Number((await patient.look("SELECT UNIX_TIMESTAMP(SYSDATE(3)) * 1000 AS ms"))[0]?.["ms"]),
);

export const connectionChecks: readonly MysqlCheck[] = [
  version,
  lookAlike,
  galera,
  group,
  advisoryLocks,
  replica,
  pooler,
  clock,
  rights,
  database,
];
