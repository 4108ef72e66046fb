import type { Check, Finding } from "../check.ts";
import type { MysqlPatient } from "./patient.ts";

type MysqlCheck = Check<MysqlPatient>;

/** MySQL keeps it over a restart; MariaDB needs the line in its file too. */
export function set({ maria }: MysqlPatient, setting: string, value: string): string {
  return maria
    ? `SET GLOBAL ${setting} = ${value};\n-- and in my.cnf: ${setting} = ${value.replaceAll("'", "")}`
    : `SET PERSIST ${setting} = ${value};`;
}

const off = (value: string | undefined): boolean => value === "OFF" || value === "0" || value === "NO";

/** Seconds, as Holdfast's own waits (5 s) and those of people allow. */
const longestLockWait = 30;

const lockTimeout: MysqlCheck = {
  id: "lock-timeout",
  title: `innodb_lock_wait_timeout is longer than ${longestLockWait} s`,
  async run(patient) {
    const seconds = Number((await patient.settings()).get("innodb_lock_wait_timeout"));
    if (seconds <= longestLockWait) return [];
    return [
      {
        severity: "warning",
        what: `innodb_lock_wait_timeout is ${seconds} s`,
        why: "A statement that meets a locked row waits that long, and its connection with it: one stuck holder takes the whole pool.",
        fix: set(patient, "innodb_lock_wait_timeout", "5"),
      },
    ];
  },
};

const metadataLockTimeout: MysqlCheck = {
  id: "metadata-lock-timeout",
  title: "lock_wait_timeout (of metadata locks) is longer than an hour",
  async run(patient) {
    const seconds = Number((await patient.settings()).get("lock_wait_timeout"));
    if (seconds <= 3600) return [];
    return [
      {
        severity: "warning",
        what: `lock_wait_timeout is ${seconds} s`,
        why: "An ALTER TABLE behind an open transaction waits for that long, and every statement on the table waits behind it.",
        fix: set(patient, "lock_wait_timeout", "60"),
      },
    ];
  },
};

const statementTimeout: MysqlCheck = {
  id: "statement-timeout",
  title: "statements have no limit of time (max_execution_time; MariaDB: max_statement_time)",
  async run(patient) {
    const setting = patient.maria ? "max_statement_time" : "max_execution_time";
    if (Number((await patient.settings()).get(setting)) > 0) return [];
    return [
      {
        severity: "hint",
        what: `${setting} is 0: no limit`,
        why: `A ${patient.maria ? "statement" : "SELECT"} that runs away keeps every lock of its transaction meanwhile.`,
        fix: set(patient, setting, patient.maria ? "30" : "30000"),
      },
    ];
  },
};

const timeoutOrder: MysqlCheck = {
  id: "timeout-order",
  title: "the lock's limit is not shorter than the statement's, so that it never strikes",
  async run(patient) {
    const settings = await patient.settings();
    const lock = Number(settings.get("innodb_lock_wait_timeout"));
    const setting = patient.maria ? "max_statement_time" : "max_execution_time";
    const statement = Number(settings.get(setting)) / (patient.maria ? 1 : 1000);
    if (statement === 0 || lock < statement) return [];
    return [
      {
        severity: "warning",
        what: `innodb_lock_wait_timeout is ${lock} s, ${setting} ${statement} s`,
        why: "The statement's limit ends the wait first, with another error: code that retries after a busy lock (1205) takes it for a slow query.",
        // A second is the least that a lock's limit can be.
        fix:
          lock > 1 && statement > 1
            ? set(patient, "innodb_lock_wait_timeout", String(Math.max(1, Math.floor(statement / 4))))
            : set(patient, setting, String(4 * lock * (patient.maria ? 1 : 1000))),
      },
    ];
  },
};

const idleTimeout: MysqlCheck = {
  id: "idle-in-transaction-timeout",
  title: "nothing ends a transaction that is idle (MariaDB: idle_transaction_timeout; MySQL: wait_timeout)",
  async run(patient) {
    const settings = await patient.settings();
    const wait = Number(settings.get("wait_timeout"));
    const why =
      "A process that is frozen, or that forgot its COMMIT, keeps its locks until somebody finds it; everybody else waits.";
    if (patient.maria) {
      if (Number(settings.get("idle_transaction_timeout")) > 0) return [];
      return [
        {
          severity: "warning",
          what: "idle_transaction_timeout is 0: no limit",
          why,
          fix: set(patient, "idle_transaction_timeout", "30"),
        },
      ];
    }
    if (wait <= 3600) return [];
    return [
      {
        severity: "warning",
        what: `wait_timeout is ${wait} s, and MySQL has no limit of its own for idle transactions`,
        why,
        fix: set(patient, "wait_timeout", "600"),
      },
    ];
  },
};

const lockWaitLogging: MysqlCheck = {
  id: "lock-wait-logging",
  title: "deadlocks are not in the server's log",
  async run(patient) {
    if (!off((await patient.settings()).get("innodb_print_all_deadlocks"))) return [];
    return [
      {
        severity: "hint",
        what: "innodb_print_all_deadlocks is OFF",
        why: "Only the last deadlock is kept: after an incident nobody can tell which statements met.",
        fix: set(patient, "innodb_print_all_deadlocks", "ON"),
      },
    ];
  },
};

const deadlockDetection: MysqlCheck = {
  id: "deadlock-detection",
  title: "deadlocks are not looked for",
  async run(patient) {
    const settings = await patient.settings();
    if (!off(settings.get("innodb_deadlock_detect"))) return [];
    return [
      {
        severity: "error",
        what: "innodb_deadlock_detect is OFF",
        why: `Both sides of a deadlock wait for innodb_lock_wait_timeout (${settings.get("innodb_lock_wait_timeout")} s), and both fail.`,
        fix: set(patient, "innodb_deadlock_detect", "ON"),
      },
    ];
  },
};

const defaultIsolation: MysqlCheck = {
  id: "default-isolation",
  title: "transactions do not begin READ COMMITTED",
  async run(patient) {
    const settings = await patient.settings();
    const level = settings.get("transaction_isolation") ?? settings.get("tx_isolation") ?? "";
    if (level === "READ-COMMITTED") return [];
    const setting = settings.has("transaction_isolation") ? "transaction_isolation" : "tx_isolation";
    const why: Record<string, string> = {
      "REPEATABLE-READ":
        "A read before the lock fixes what is seen until COMMIT: code that reads, locks, then reads again decides on old rows (115 granted of 100). It also locks the gaps between rows. Holdfast's own transactions are READ COMMITTED.",
      "READ-UNCOMMITTED":
        "What others have not committed is read, and decided upon; it may never have happened.",
      SERIALIZABLE:
        "Every SELECT locks what it reads: two that check the same rows, then write, are a deadlock.",
    };
    return [
      {
        severity: level === "REPEATABLE-READ" ? "hint" : level === "SERIALIZABLE" ? "warning" : "error",
        what: `${setting} is ${level}`,
        why: why[level] ?? "It is not known here.",
        fix:
          patient.maria && setting === "tx_isolation"
            ? "SET GLOBAL tx_isolation = 'READ-COMMITTED';\n-- and in my.cnf: transaction-isolation = READ-COMMITTED"
            : set(patient, setting, "'READ-COMMITTED'"),
      },
    ];
  },
};

export const snapshotIsolation: MysqlCheck = {
  id: "snapshot-isolation",
  title: "REPEATABLE READ overwrites what others have changed since (innodb_snapshot_isolation)",
  async run(patient) {
    if (!off((await patient.settings()).get("innodb_snapshot_isolation"))) return [];
    return [
      {
        severity: "warning",
        what: "innodb_snapshot_isolation is OFF",
        why: "A REPEATABLE READ transaction that read a row may overwrite a newer one without an error: a lost update. With it on, it fails with 1020 and is run again.",
        fix: set(patient, "innodb_snapshot_isolation", "ON"),
      },
    ];
  },
};

const rollbackOnTimeout: MysqlCheck = {
  id: "rollback-on-timeout",
  title: "after a lock wait timeout (1205) the transaction stays open with its locks",
  async run(patient) {
    if (!off((await patient.settings()).get("innodb_rollback_on_timeout"))) return [];
    return [
      {
        severity: "hint",
        what: "innodb_rollback_on_timeout is OFF",
        why: "Only the statement is undone. Code that takes 1205 for the end of its transaction leaves it open, or commits half of it. (hf.transaction rolls back by itself.)",
        fix: "innodb_rollback_on_timeout = ON   # in my.cnf, under [mysqld]; needs a restart",
      },
    ];
  },
};

const durability: MysqlCheck = {
  id: "durability",
  title: "what was committed can be lost in a crash",
  async run(patient) {
    const settings = await patient.settings();
    const why =
      "A crash forgets the last second of commits that were confirmed: what was granted once is granted again, and a fence may be given twice.";
    const found: Finding[] = [];
    const flush = settings.get("innodb_flush_log_at_trx_commit");
    if (flush !== "1")
      found.push({
        severity: "warning",
        what: `innodb_flush_log_at_trx_commit is ${flush}`,
        why,
        fix: set(patient, "innodb_flush_log_at_trx_commit", "1"),
      });
    if (settings.get("character_set_results") === "binary")
      found.push({
        severity: "error",
        what: "character_set_results is binary",
        why: "Texts come as bytes. Holdfast refuses it.",
        fix: set(patient, "character_set_results", "'utf8mb4'"),
      });
    const joined = Number(settings.get("max_join_size") ?? Infinity);
    if (settings.get("sql_big_selects") === "OFF" && joined < 1_000_000)
      found.push({
        severity: "error",
        what: `max_join_size is ${joined}`,
        why: "The server refuses to join tables that are not small (1104). Holdfast refuses it.",
        fix: set(patient, "max_join_size", "DEFAULT"),
      });
    if (settings.get("log_bin") === "ON" && settings.get("sync_binlog") !== "1")
      found.push({
        severity: "warning",
        what: `sync_binlog is ${settings.get("sync_binlog")}, with log_bin on`,
        why: "After a crash the replicas have less, or more, than the primary: whoever fails over grants again what was granted.",
        fix: set(patient, "sync_binlog", "1"),
      });
    if (off(settings.get("innodb_doublewrite")))
      found.push({
        severity: "error",
        what: "innodb_doublewrite is OFF",
        why: "A crash of the machine in the middle of a write can leave a page half written, which nothing repairs.",
        fix: "innodb_doublewrite = ON   # in my.cnf, under [mysqld]; needs a restart",
      });
    return found;
  },
};

const constraintsOff: MysqlCheck = {
  id: "constraints-off",
  title: "foreign keys, unique keys or strict mode are switched off for these sessions",
  async run(patient) {
    const settings = await patient.settings();
    const found: Finding[] = [];
    for (const [setting, why] of [
      ["foreign_key_checks", "Rows may point to nothing, whatever the schema says."],
      ["unique_checks", "The engine may let a duplicate in: an idempotency key that holds nothing."],
    ] as const)
      if (off(settings.get(setting)))
        found.push({ severity: "error", what: `${setting} is OFF`, why, fix: set(patient, setting, "ON") });
    const mode = settings.get("sql_mode") ?? "";
    if (!/STRICT_(?:TRANS|ALL)_TABLES|TRADITIONAL/.test(mode))
      found.push({
        severity: "warning",
        what: `sql_mode has no STRICT_TRANS_TABLES: ${mode === "" ? "it is empty" : mode}`,
        why: "A number that is out of range is cut to fit, and a key that is too long is cut short, without an error: two keys become one, a balance of -1 becomes 0.",
        fix: set(patient, "sql_mode", `'${["STRICT_TRANS_TABLES", mode].filter(Boolean).join(",")}'`),
      });
    return found;
  },
};

const autocommit: MysqlCheck = {
  id: "autocommit",
  title: "autocommit is off, or COMMIT begins the next transaction",
  async run(patient) {
    const settings = await patient.settings();
    const found: Finding[] = [];
    if (off(settings.get("autocommit")))
      found.push({
        severity: "warning",
        what: "autocommit is OFF",
        why: "Every read opens a transaction that nobody ends: its snapshot gets old, its locks stay, and the connection goes back to the pool with both.",
        fix: set(patient, "autocommit", "ON"),
      });
    const completion = settings.get("completion_type") ?? "NO_CHAIN";
    if (completion !== "NO_CHAIN" && completion !== "0")
      found.push({
        severity: "warning",
        what: `completion_type is ${completion}`,
        why: "COMMIT begins another transaction, or ends the session: what comes next is in a transaction that nobody opened.",
        fix: set(patient, "completion_type", "'NO_CHAIN'"),
      });
    return found;
  },
};

/** Holdfast refuses the first ones by name, too. */
const otherMeanings: readonly (readonly [mode: string, severity: "error" | "warning", why: string])[] = [
  ["ORACLE", "error", "Routines are written in another language: Holdfast refuses it."],
  ["EMPTY_STRING_IS_NULL", "error", "An empty text is stored as NULL: Holdfast refuses it."],
  [
    "SIMULTANEOUS_ASSIGNMENT",
    "error",
    "An UPDATE computes each column from the row as it was: Holdfast refuses it.",
  ],
  [
    "NO_UNSIGNED_SUBTRACTION",
    "warning",
    "1 - 2 of unsigned numbers is -1 and no error: a guard such as WHERE stock - n >= 0 means something else than on other servers.",
  ],
  [
    "PAD_CHAR_TO_FULL_LENGTH",
    "warning",
    "A key in a CHAR column comes back longer than it was written, and is another key wherever it is compared.",
  ],
];

const meanings: MysqlCheck = {
  id: "session-settings",
  title:
    "settings of sessions that cut answers, or change what statements mean (sql_select_limit, sql_mode…)",
  async run(patient) {
    const settings = await patient.settings();
    const found: Finding[] = [];
    const limit = Number(settings.get("sql_select_limit") ?? Infinity);
    if (limit < 2 ** 32)
      found.push({
        severity: "error",
        what: `sql_select_limit is ${limit}`,
        why: "The server leaves rows out of every answer without a LIMIT: a check sees less than there is. Holdfast refuses it.",
        fix: set(patient, "sql_select_limit", "DEFAULT"),
      });
    const list = Number(settings.get("group_concat_max_len") ?? Infinity);
    if (list < 1024)
      found.push({
        severity: "error",
        what: `group_concat_max_len is ${list}`,
        why: "Lists that the server makes (GROUP_CONCAT, JSON_ARRAYAGG on MariaDB) are cut. Holdfast refuses it.",
        fix: set(patient, "group_concat_max_len", "1048576"),
      });
    if (settings.get("character_set_results") === "binary")
      found.push({
        severity: "error",
        what: "character_set_results is binary",
        why: "Texts come as bytes. Holdfast refuses it.",
        fix: set(patient, "character_set_results", "'utf8mb4'"),
      });
    const joined = Number(settings.get("max_join_size") ?? Infinity);
    if (settings.get("sql_big_selects") === "OFF" && joined < 1_000_000)
      found.push({
        severity: "error",
        what: `max_join_size is ${joined}`,
        why: "The server refuses to join tables that are not small (1104). Holdfast refuses it.",
        fix: set(patient, "max_join_size", "DEFAULT"),
      });
    if (settings.get("log_bin") === "ON" && settings.get("binlog_format") === "STATEMENT")
      found.push({
        severity: "error",
        what: "binlog_format is STATEMENT",
        why: "The server refuses to write at READ COMMITTED then (1665), as every transaction of Holdfast's does. Holdfast refuses it.",
        fix: set(patient, "binlog_format", "'ROW'"),
      });
    if (settings.get("sql_safe_updates") === "ON")
      found.push({
        severity: "hint",
        what: "sql_safe_updates is ON",
        why: "An UPDATE or a DELETE that finds its rows without a key is refused (1175), also one that a plan makes so as a table grows. Holdfast turns it off for its own statements.",
        fix: set(patient, "sql_safe_updates", "OFF"),
      });
    const readOnly = settings.has("transaction_read_only") ? "transaction_read_only" : "tx_read_only";
    if (settings.get(readOnly) === "ON")
      found.push({
        severity: "warning",
        what: `${readOnly} is ON`,
        why: "Transactions begin read only: code that writes fails (1792). Holdfast's own say that they write.",
        fix: set(patient, readOnly, "OFF"),
      });
    const modes = (settings.get("sql_mode") ?? "").split(",");
    for (const [mode, severity, why] of otherMeanings)
      if (modes.includes(mode))
        found.push({
          severity,
          what: `sql_mode has ${mode}`,
          why,
          fix: set(patient, "sql_mode", `'${modes.filter((each) => each !== mode).join(",")}'`),
        });
    return found;
  },
};

export const settingChecks: readonly MysqlCheck[] = [
  lockTimeout,
  metadataLockTimeout,
  statementTimeout,
  timeoutOrder,
  idleTimeout,
  lockWaitLogging,
  deadlockDetection,
  defaultIsolation,
  rollbackOnTimeout,
  durability,
  constraintsOff,
  meanings,
  autocommit,
];
