import type { Check, Finding } from "../check.ts";
import { type PostgresPatient, type Setting, literal, name } from "./patient.ts";

type PostgresCheck = Check<PostgresPatient>;

/** In milliseconds; 0 is "no limit". */
export function milliseconds(setting: Setting | undefined): number {
  const factor = { ms: 1, s: 1000, min: 60_000 }[setting?.unit ?? ""] ?? 1;
  return Number(setting?.value ?? 0) * factor;
}

export const shown = (ms: number): string => (ms % 1000 === 0 ? `${ms / 1000}s` : `${ms}ms`);

/** Where it takes effect: what is set more closely to the session wins over the role's. */
export function forRole({ me }: PostgresPatient, setting: Setting | undefined, value: string): string {
  const to = `SET ${setting?.name} = ${literal(value)}`;
  if (setting?.source === "client")
    return `Take ${setting.name} out of the connection's options; then\nALTER ROLE ${name(me.role)} ${to};`;
  if (setting?.source === "database user")
    return `ALTER ROLE ${name(me.role)} IN DATABASE ${name(me.database)} ${to};`;
  return `ALTER ROLE ${name(me.role)} ${to};`;
}

const forServer = (setting: string, value: string): string =>
  `ALTER SYSTEM SET ${setting} = ${literal(value)};\nSELECT pg_reload_conf();`;

/** A limit of time that is not set. */
function unset(
  id: string,
  title: string,
  setting: string,
  recommended: string,
  severity: Finding["severity"],
  why: string,
  isCovered?: (settings: ReadonlyMap<string, Setting>) => boolean,
): PostgresCheck {
  return {
    id,
    title,
    async run(patient) {
      const settings = await patient.settings();
      const found = settings.get(setting);
      // Not one of this version.
      if (!found || milliseconds(found) > 0 || isCovered?.(settings)) return [];
      return [
        { severity, what: `${setting} is 0: no limit`, why, fix: forRole(patient, found, recommended) },
      ];
    },
  };
}

const lockTimeout = unset(
  "lock-timeout",
  "lock_timeout is not set",
  "lock_timeout",
  "5s",
  "warning",
  "A statement that meets a lock waits for ever, and its connection with it: one stuck holder takes the whole pool. (Holdfast's own locks have a limit; your row locks and DDL have not.)",
);

const statementTimeout = unset(
  "statement-timeout",
  "statement_timeout is not set",
  "statement_timeout",
  "30s",
  "hint",
  "A statement that runs away keeps every lock of its transaction meanwhile.",
);

const timeoutOrder: PostgresCheck = {
  id: "timeout-order",
  title: "lock_timeout is not shorter than statement_timeout, so that it never strikes",
  async run(patient) {
    const settings = await patient.settings();
    const [lock, statement] = [settings.get("lock_timeout"), settings.get("statement_timeout")];
    const [lockMs, statementMs] = [milliseconds(lock), milliseconds(statement)];
    if (lockMs === 0 || statementMs === 0 || lockMs < statementMs) return [];
    return [
      {
        severity: "warning",
        what: `lock_timeout is ${shown(lockMs)}, statement_timeout ${shown(statementMs)}`,
        why: "The statement's limit ends the wait first, as 57014 instead of 55P03: code that retries after a busy lock takes it for a slow query.",
        fix: forRole(patient, statement, shown(lockMs * 4)),
      },
    ];
  },
};

const idleTimeout = unset(
  "idle-in-transaction-timeout",
  "idle_in_transaction_session_timeout is not set",
  "idle_in_transaction_session_timeout",
  "30s",
  "warning",
  "A process that is frozen, or that forgot its COMMIT, keeps its locks until somebody finds it; everybody else waits.",
  (settings) => milliseconds(settings.get("transaction_timeout")) > 0,
);

const transactionTimeout = unset(
  "transaction-timeout",
  "transaction_timeout (PostgreSQL 17) is not set",
  "transaction_timeout",
  "60s",
  "hint",
  "Nothing ends a transaction that goes on for ever with short statements. (Holdfast sets it for its own; other code has none.)",
);

const lockWaitLogging: PostgresCheck = {
  id: "lock-wait-logging",
  title: "waits for locks are not in the server's log",
  async run(patient) {
    if ((await patient.settings()).get("log_lock_waits")?.value !== "off") return [];
    return [
      {
        severity: "hint",
        what: "log_lock_waits is off",
        why: "After an incident nobody can tell who waited for whom: with it, waits longer than deadlock_timeout are logged with holder and statement.",
        fix: forServer("log_lock_waits", "on"),
      },
    ];
  },
};

const recommendedDeadlockMs = 1000;

/** Of what is the server's as a rule: where a role or a database has its own, that one counts. */
export const forWhom = (patient: PostgresPatient, setting: Setting | undefined, value: string): string =>
  /^(?:user|database|client)/.test(setting?.source ?? "")
    ? forRole(patient, setting, value)
    : forServer(String(setting?.name), value);

const deadlockDetection: PostgresCheck = {
  id: "deadlock-detection",
  title: "deadlock_timeout is so long that deadlocks are found late, or as lock timeouts",
  async run(patient) {
    const settings = await patient.settings();
    const [found, limit] = [settings.get("deadlock_timeout"), settings.get("lock_timeout")];
    const [deadlock, lock] = [milliseconds(found), milliseconds(limit)];
    const late = lock > 0 && deadlock >= lock;
    if (!late && deadlock <= 5000) return [];
    // Whichever of them is not as it is recommended: it may be both.
    const fixes = [
      ...(deadlock > recommendedDeadlockMs ? [forWhom(patient, found, shown(recommendedDeadlockMs))] : []),
      ...(late && lock <= recommendedDeadlockMs ? [forRole(patient, limit, "5s")] : []),
    ];
    return [
      {
        severity: "warning",
        what: `deadlock_timeout is ${shown(deadlock)}${late ? `, lock_timeout ${shown(lock)}` : ""}`,
        why: late
          ? "The lock's limit ends both sides before the deadlock is looked for: they fail as busy, and a retry of deadlocks (40P01) never happens."
          : "Two transactions in a deadlock keep their locks for that long before one is ended.",
        fix: fixes.join("\n"),
      },
    ];
  },
};

const defaultIsolation: PostgresCheck = {
  id: "default-isolation",
  title: "transactions do not begin READ COMMITTED",
  async run(patient) {
    const found = (await patient.settings()).get("default_transaction_isolation");
    if (found === undefined || /^read (un)?committed$/.test(found.value)) return [];
    return [
      {
        severity: "warning",
        what: `default_transaction_isolation is ${found.value}`,
        why:
          found.value === "serializable"
            ? "Those who wait for a lock wake up with an old snapshot and fail with 40001; hf.join refuses to lock there."
            : "The snapshot is older than the lock: code that locks, then reads, reads what was before the wait. hf.join refuses it.",
        fix: forRole(patient, found, "read committed"),
      },
    ];
  },
};

/** Of other roles and databases: for this one the other checks see what it comes to. Backups may well have no limits of statements. */
const weaker: Readonly<Record<string, { readonly bad: RegExp; readonly why: string }>> = {
  lock_timeout: { bad: /^0\D*$/, why: "waits of these sessions have no end" },
  idle_in_transaction_session_timeout: {
    bad: /^0\D*$/,
    why: "a forgotten transaction of these sessions keeps its locks for ever",
  },
  transaction_timeout: { bad: /^0\D*$/, why: "transactions of these sessions have no end" },
  default_transaction_isolation: {
    bad: /^(repeatable read|serializable)$/i,
    why: "code that locks, then reads, reads what was before the wait",
  },
  synchronous_commit: {
    bad: /^(off|false|no|0)$/i,
    why: "what was confirmed may be forgotten after a crash",
  },
  session_replication_role: { bad: /^(replica)$/i, why: "foreign keys and triggers are not obeyed" },
};

const overrides: PostgresCheck = {
  id: "overrides",
  title: "a role or a database overrides these settings with weaker ones",
  async run(patient) {
    const { me } = patient;
    const rows = await patient.look(
      `SELECT r.rolname AS role, d.datname AS database, s.setconfig AS config
FROM pg_db_role_setting s LEFT JOIN pg_database d ON d.oid = s.setdatabase LEFT JOIN pg_roles r ON r.oid = s.setrole
WHERE (s.setdatabase = 0 OR d.datname = current_database()) AND (s.setrole = 0 OR (r.rolcanlogin AND r.rolname <> current_user))
ORDER BY 1, 2`,
    );
    const settings = await patient.settings();
    const found: Finding[] = [];
    for (const { role, database, config } of rows) {
      for (const entry of config as string[]) {
        const at = entry.indexOf("=");
        const [setting, value] = [entry.slice(0, at), entry.slice(at + 1)];
        const rule = weaker[setting];
        if (!rule?.bad.test(value)) continue;
        // The database's own, if this role has nothing better: the check of that setting tells.
        if (role === null && settings.get(setting)?.source === "database") continue;
        const whom =
          role === null
            ? `DATABASE ${name(String(database))}`
            : `ROLE ${name(String(role))}${database === null ? "" : ` IN DATABASE ${name(me.database)}`}`;
        found.push({
          severity: "hint",
          what: `${setting} is ${value} for ${whom.toLowerCase().startsWith("role") ? "role" : "database"} ${String(role ?? database)}`,
          why: `Other than for you: ${rule.why}.`,
          fix: `ALTER ${whom} RESET ${setting};`,
        });
      }
    }
    return found;
  },
};

const durability: PostgresCheck = {
  id: "durability",
  title: "what was committed can be lost in a crash",
  async run(patient) {
    const settings = await patient.settings();
    const found: Finding[] = [];
    for (const setting of ["fsync", "full_page_writes"])
      if (settings.get(setting)?.value === "off")
        found.push({
          severity: "error",
          what: `${setting} is off`,
          why: "A crash of the machine can leave the tables damaged: unique keys with duplicates, counters that went back.",
          fix: forServer(setting, "on"),
        });
    const commit = settings.get("synchronous_commit");
    if (commit?.value === "off")
      found.push({
        severity: "warning",
        what: "synchronous_commit is off",
        why: "A crash forgets the last commits that were confirmed: what was granted once is granted again, and a fence may be given twice.",
        fix: forRole(patient, commit, "on"),
      });
    return found;
  },
};

const constraintsOff: PostgresCheck = {
  id: "constraints-off",
  title: "foreign keys and triggers are switched off for these sessions",
  async run(patient) {
    const found = (await patient.settings()).get("session_replication_role");
    if (found?.value !== "replica") return [];
    return [
      {
        severity: "error",
        what: "session_replication_role is replica",
        why: "Foreign keys and ordinary triggers are not obeyed: rows may point to nothing, whatever the schema says.",
        fix: forRole(patient, found, "origin"),
      },
    ];
  },
};

/** Holdfast refuses both by name, too. */
const meanings: PostgresCheck = {
  id: "session-settings",
  title: "settings of sessions that change values (array_nulls, extra_float_digits)",
  async run(patient) {
    const settings = await patient.settings();
    const [nulls, digits] = [settings.get("array_nulls"), settings.get("extra_float_digits")];
    const found: Finding[] = [];
    if (nulls?.value === "off")
      found.push({
        severity: "error",
        what: "array_nulls is off",
        why: "A missing value in a list that a client sends becomes the text NULL. Holdfast refuses it.",
        fix: forRole(patient, nulls, "on"),
      });
    if (Number(digits?.value ?? 0) < 0)
      found.push({
        severity: "error",
        what: `extra_float_digits is ${digits?.value}`,
        why: "The server rounds numbers that it sends, points in time among them. Holdfast refuses it.",
        fix: forRole(patient, digits, "1"),
      });
    return found;
  },
};

const keepalive: PostgresCheck = {
  id: "keepalive",
  title: "the server notices late that a client's machine is gone",
  async run(patient) {
    const found = (await patient.settings()).get("tcp_keepalives_idle");
    const idle = milliseconds(found);
    // 0: a socket of the same machine, which needs none.
    if (idle <= 300_000) return [];
    return [
      {
        severity: "hint",
        what: `tcp_keepalives_idle is ${shown(idle)}`,
        why: "A machine that lost its power or its network says no good-bye: its session locks (hf.hold) stay taken for that long.",
        fix: `ALTER SYSTEM SET tcp_keepalives_idle = '60s';\nALTER SYSTEM SET tcp_keepalives_interval = '10s';\nALTER SYSTEM SET tcp_keepalives_count = 6;\nSELECT pg_reload_conf();`,
      },
    ];
  },
};

export const settingChecks: readonly PostgresCheck[] = [
  lockTimeout,
  statementTimeout,
  timeoutOrder,
  idleTimeout,
  transactionTimeout,
  lockWaitLogging,
  deadlockDetection,
  defaultIsolation,
  overrides,
  durability,
  constraintsOff,
  meanings,
  keepalive,
];
