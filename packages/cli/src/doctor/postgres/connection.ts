/** What is at the other end of the connection, and what stands between. */
import { randomBytes, randomInt } from "node:crypto";
import { within } from "../../within.ts";
import { type Check, CouldNotLook, type Finding } from "../check.ts";
import { clockSkew } from "../clock.ts";
import { writableReplica } from "../replica.ts";
import { type PostgresPatient, name } from "./patient.ts";
import { forWhom } from "./settings.ts";

type PostgresCheck = Check<PostgresPatient>;

/** As in docs/engines/postgres.md. */
const minimum = 14;

const version: PostgresCheck = {
  id: "version",
  title: `PostgreSQL is older than ${minimum}`,
  async run({ me }) {
    if (me.number === 0 || me.number >= minimum * 10_000) return [];
    return [
      {
        severity: "error",
        what: `the server is PostgreSQL ${Math.floor(me.number / 10_000)}`,
        why: `Holdfast refuses it: releases before ${minimum} no longer get fixes from their makers.`,
        fix: `Upgrade the server to PostgreSQL ${minimum} or newer.`,
      },
    ];
  },
};

const others =
  /CockroachDB|Aurora DSQL|\bDSQL\b|Yugabyte|-YB-|Spanner|Materialize|Redshift|Greenplum|QuestDB|RisingWave|CrateDB/i;

const lookAlike: PostgresCheck = {
  id: "look-alike",
  title: "a server that speaks PostgreSQL's protocol and is another one (CockroachDB, DSQL, YugabyteDB…)",
  async run({ me }) {
    const found = others.exec(me.version)?.[0];
    if (found === undefined) return [];
    const product = /^(?:-YB-|Yugabyte)/i.test(found) ? "YugabyteDB" : found;
    return [
      {
        severity: "error",
        what: `the server is ${product}: ${me.version.slice(0, 80)}`,
        why: "Its advisory locks are missing or lock nothing, and its row locks differ: two callers can both get the last one.",
        fix: "Use a PostgreSQL for what has to be exact.",
      },
    ];
  },
};

const advisoryLocks: PostgresCheck = {
  id: "advisory-locks",
  title: "an advisory lock does not exclude (tried with two sessions on a random key)",
  async run(patient) {
    if ((await patient.pooling()) === "statement")
      throw new CouldNotLook("a pooler in statement mode allows no transactions", "pool_mode = transaction");
    await using a = await patient.session();
    await using b = await patient.session();
    const take = `SELECT pg_catalog.pg_try_advisory_xact_lock(${randomInt(2 ** 47)}::bigint) AS taken`;
    const taken = async (session: typeof a): Promise<boolean> => {
      await session.query("BEGIN READ ONLY");
      return (await session.query(take))[0]?.["taken"] === true;
    };
    let excludes: boolean;
    let what = "two sessions got the same advisory lock at once";
    try {
      excludes = (await taken(a)) && !(await taken(b));
    } catch (error) {
      const { code, message } = error as { code?: unknown; message?: unknown };
      // No such function, not built in, or not for this user.
      if (code !== "42883" && code !== "0A000" && code !== "42501") throw error;
      excludes = false;
      what = `advisory locks cannot be taken: ${String(message)}`;
    } finally {
      await a.query("ROLLBACK").catch(() => {});
      await b.query("ROLLBACK").catch(() => {});
    }
    if (excludes) return [];
    return [
      {
        severity: "error",
        what,
        why: "Whoever relies on them lets two in at once. Holdfast falls back to lock rows; other code (migration tools, schedulers) does not.",
        fix: 'holdfast(fromPg(pool), { strategy: "lock row" })',
      },
    ];
  },
};

const replica: PostgresCheck = {
  id: "replica",
  title: "the server is a replica, or sessions are read-only",
  async run(patient) {
    const { me } = patient;
    if (me.standby)
      return [
        {
          severity: "error",
          what: "the server is a standby (pg_is_in_recovery)",
          why: "Locks taken here are not seen by the primary, and what is read is older than what is there. Holdfast refuses it (HF_REPLICA).",
          fix: "Connect to the primary; with several hosts: target_session_attrs=read-write.",
        },
      ];
    const fed = await writableReplica(patient.server);
    const found = (await patient.settings()).get("default_transaction_read_only");
    if (found?.value !== "on") return fed;
    return [
      ...fed,
      {
        severity: "error",
        what: "default_transaction_read_only is on",
        why: "Every write fails with 25006, Holdfast's too: the check runs, the write does not. Somebody may have set it on purpose, as when a server is about to be replaced: Holdfast does not override it.",
        fix: forWhom(patient, found, "off"),
      },
    ];
  },
};

const pooler: PostgresCheck = {
  id: "pooler",
  title: "a pooler lends sessions out per transaction or per statement (tried with two sessions)",
  async run(patient) {
    const pooling = await patient.pooling();
    if (pooling === "none") return [];
    if (pooling === "statement")
      return [
        {
          severity: "error",
          what: "a pooler in statement mode stands between: BEGIN is refused",
          why: "Check and write cannot be in one transaction: nothing can be made exact through it.",
          fix: "pool_mode = transaction   ; in pgbouncer.ini",
        },
      ];
    return [
      {
        severity: "warning",
        what: "a pooler in transaction mode stands between: while one session was in a transaction, another one changed its backend",
        why: "A session lock (hf.hold, pg_advisory_lock), LISTEN and SET stay behind on a connection that others get next. Locks of a transaction work; hf.hold and locks under SERIALIZABLE are refused.",
        fix: "Connect to the server itself for these, or\npool_mode = session   ; in pgbouncer.ini",
      },
    ];
  },
};

/** What makes it answer from elsewhere than from the primary, as in docs/engines/postgres.md. */
const pgpoolSettings: Readonly<Record<string, RegExp>> = {
  load_balance_mode: /^off$/,
  memory_cache_enabled: /^off$/,
  backend_clustering_mode: /^(?:streaming_replication|raw)$/,
};

const pgpool: PostgresCheck = {
  id: "pgpool",
  title: "pgpool-II answers from a standby, or from a cache",
  async run(patient) {
    await using session = await patient.session();
    const asked = async (text: string): Promise<string | undefined> => {
      try {
        return String(Object.values((await session.query(text))[0] ?? {})[0]);
      } catch (error) {
        // A server has no such setting, and an older pgpool-II not all of them.
        const { code } = error as { code?: unknown };
        if (code === "42704" || code === "42601" || code === "XX000") return undefined;
        throw error;
      }
    };
    const found = await asked("SHOW pool_version");
    if (found === undefined) return [];
    const wrong: string[] = [];
    for (const [setting, right] of Object.entries(pgpoolSettings)) {
      const value = await asked(`PGPOOL SHOW ${setting}`);
      if (value === undefined || !right.test(value)) wrong.push(`${setting} = ${value ?? "(not told)"}`);
    }
    if (wrong.length === 0) return [];
    return [
      {
        severity: "error",
        what: `pgpool-II ${found.split(" ")[0]} stands between, and may answer from elsewhere than from the primary: ${wrong.join(", ")}`,
        why: "What is read under a lock can be what was true before, also inside of a transaction: several callers get the last one. Holdfast refuses it (HF_UNSUPPORTED).",
        fix: "Connect to the primary itself, or in pgpool.conf, with a restart:\nload_balance_mode = off\nmemory_cache_enabled = off\nbackend_clustering_mode = 'streaming_replication'",
      },
    ];
  },
};

/** Generous: the message of a healthy server takes as long as one round trip. */
const notifyMs = 5000;

const notify: PostgresCheck = {
  id: "notify",
  title: "NOTIFY does not arrive (tried with two sessions on a random channel)",
  async run(patient) {
    if (patient.me.standby) throw new CouldNotLook("a standby has no LISTEN", "Ask the primary.");
    const { Client } = await import("pg");
    const channel = `holdfast_doctor_${randomBytes(8).toString("hex")}`;
    const listener = new Client({ connectionString: patient.server.url, connectionTimeoutMillis: 10_000 });
    listener.on("error", () => {});
    await listener.connect();
    try {
      const heard = new Promise<true>((resolve) =>
        listener.on("notification", (message) => {
          if (message.channel === channel) resolve(true);
        }),
      );
      let refused: string | undefined;
      try {
        await within(notifyMs, listener.query(`LISTEN ${channel}`));
        await using sender = await patient.session();
        await sender.query(`NOTIFY ${channel}`);
      } catch (error) {
        if (patient.hindrance(error)) throw error;
        refused = error instanceof Error ? error.message : String(error);
      }
      const arrived = refused === undefined ? await within(notifyMs, heard).catch(() => false) : false;
      // A pooler may have left the LISTEN on a connection that others get: taken back as far as it can be.
      await listener.query(`UNLISTEN ${channel}`).catch(() => {});
      if (arrived) return [];
      return [
        {
          severity: "warning",
          what:
            refused === undefined
              ? `a NOTIFY was sent, and did not reach the session that had said LISTEN within ${notifyMs / 1000} s`
              : `LISTEN and NOTIFY are refused: ${refused}`,
          why: "Workers and those who wait for a lease are not woken: they find out when they look again. Code of your own that relies on it waits for ever.",
          fix: "Connect the listening process to the server itself, not through the pooler (its pool_mode must be session).",
        },
      ];
    } finally {
      await listener.end();
    }
  },
};

const rights: PostgresCheck = {
  id: "rights",
  title: "the role may not see what sessions of others do",
  async run({ me }): Promise<Finding[]> {
    if (me.monitor) return [];
    return [
      {
        severity: "hint",
        what: `role ${me.role} is no member of pg_monitor`,
        why: "A lock timeout cannot say who held the lock and since when, and some checks here see this role's own sessions only.",
        fix: `GRANT pg_monitor TO ${name(me.role)};`,
      },
    ];
  },
};

const clock: PostgresCheck = clockSkew(async (patient) =>
  Number((await patient.look("SELECT extract(epoch FROM clock_timestamp()) * 1000 AS ms"))[0]?.["ms"]),
);

export const connectionChecks: readonly PostgresCheck[] = [
  version,
  lookAlike,
  advisoryLocks,
  replica,
  pooler,
  pgpool,
  notify,
  clock,
  rights,
];
