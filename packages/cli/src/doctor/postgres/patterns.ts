/** Queues, schedules, stock and quotas: what stands still, and what does not add up. Each looks at so many, found by index. */
import type { Row } from "../../server.ts";
import { age } from "../../terminal.ts";
import { plural, shown } from "../../text.ts";
import { type Check, findings, orAbsent, short } from "../check.ts";
import type { PostgresPatient } from "./patient.ts";

type PostgresCheck = Check<PostgresPatient>;

/** Counted up to here, and a bit more to tell that there are more. */
const most = 1000;
const counted = (n: unknown): string =>
  Number(n) > most ? `more than ${plural(most, "job")}` : plural(Number(n), "job");

const some = ({ server }: PostgresPatient, table: string, condition = "true"): string =>
  `(SELECT count(*) FROM (SELECT FROM ${server.own(table)} t WHERE t.queue = q.id AND ${condition} LIMIT ${most + 1}) x)`;

/** One that does not say in time that it lives, or whose session is gone, is dead, whether or not somebody has noticed. */
const alive = `(w.beat > clock_timestamp() - w.ttl * interval '1 millisecond' AND (w.lock IS NULL OR EXISTS (SELECT FROM pg_locks l
  WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 AND ((l.classid::bigint << 32) | l.objid::bigint) = w.lock)))`;

/** How a name is given to a shell. */
const word = (text: string): string =>
  /^[\w.:@/-]+$/.test(text) ? text : `'${shown(text).replaceAll("'", "'\\''")}'`;

const failedJobs: PostgresCheck = {
  id: "failed-jobs",
  title: "jobs have failed for good",
  async run(patient) {
    const rows = await orAbsent(() =>
      patient.look(`SELECT q.name, ${some(patient, "queue_failed")} AS n, f.error,
  extract(epoch FROM clock_timestamp() - f.failed_at) * 1000 AS ms FROM ${patient.server.own("queue")} q,
  LATERAL (SELECT f.error, f.failed_at FROM ${patient.server.own("queue_failed")} f WHERE f.queue = q.id ORDER BY f.id DESC LIMIT 1) f
ORDER BY q.name LIMIT 1000`),
    );
    return findings(
      "warning",
      "They have had all of their attempts, and are not tried again by themselves.",
      rows.map((row) => ({
        what: `${counted(row["n"])} of queue ${shown(String(row["name"]))} failed; the newest ${age(Number(row["ms"]))} ago: ${short(row["error"], 80)}`,
        fix: `holdfast queue show ${word(String(row["name"]))}   # why; then holdfast queue retry, or discard`,
      })),
    );
  },
};

/** As long as a deployment may take. */
const idleMs = 60_000;

const queueWorkers: PostgresCheck = {
  id: "queue-workers",
  title: "jobs have waited for more than a minute, and no worker is alive; or the queue is paused",
  async run(patient) {
    const rows = await orAbsent(() =>
      patient.look(`SELECT q.name, q.paused,
  ${some(patient, "queue_ready")} + ${some(patient, "queue_grouped")} + ${some(patient, "queue_delayed", "t.run_at <= clock_timestamp()")} AS waiting,
  (SELECT count(*) FROM ${patient.server.own("queue_worker")} w WHERE w.queue = q.id AND ${alive}) AS workers,
  (SELECT count(*) FROM ${patient.server.own("queue_worker")} w WHERE w.queue = q.id AND NOT ${alive}) AS dead,
  (SELECT coalesce(sum(l.size - coalesce(cardinality(l.done), 0)), 0) FROM ${patient.server.own("queue_lease")} l WHERE l.queue = q.id
    AND NOT EXISTS (SELECT FROM ${patient.server.own("queue_worker")} w WHERE w.id = l.worker AND ${alive})) AS stranded,
  (SELECT extract(epoch FROM clock_timestamp() - min(o.at)) * 1000 FROM (
    (SELECT r.at FROM ${patient.server.own("queue_ready")} r WHERE r.queue = q.id ORDER BY r.priority, r.id LIMIT 1)
    UNION ALL (SELECT g.at FROM ${patient.server.own("queue_grouped")} g WHERE g.queue = q.id ORDER BY g.grp, g.priority, g.id LIMIT 1)
    UNION ALL (SELECT d.run_at FROM ${patient.server.own("queue_delayed")} d WHERE d.queue = q.id ORDER BY d.run_at LIMIT 1)) o) AS oldest
FROM ${patient.server.own("queue")} q ORDER BY q.name LIMIT 1000`),
    );
    const waiting = rows.filter((row) => Number(row["waiting"]) > 0 && Number(row["oldest"]) >= idleMs);
    const stuck = rows.filter((row) => Number(row["stranded"]) > 0 && !waiting.includes(row));
    const idle = [...waiting, ...stuck].filter((row) => Number(row["workers"]) === 0);
    return [
      ...findings(
        "error",
        "Nobody works on them. What a worker had that died comes back as soon as another one looks.",
        idle
          .filter((row) => row["paused"] !== true)
          .map((row) => ({ what: still(row), fix: "Start a worker: queue(hf, name).work(handler)" })),
      ),
      ...findings(
        "hint",
        "No worker claims anything of it before it is resumed.",
        waiting
          .filter((row) => row["paused"] === true)
          .map((row) => ({
            what: `queue ${shown(String(row["name"]))} is paused, and ${counted(row["waiting"])} wait in it, the oldest for ${age(Number(row["oldest"]))}`,
            fix: `holdfast queue resume ${word(String(row["name"]))}`,
          })),
      ),
    ];
  },
};

function still(row: Row): string {
  const dead = Number(row["dead"]);
  const parts = [
    Number(row["waiting"]) > 0
      ? `${counted(row["waiting"])} of queue ${shown(String(row["name"]))} ${Number(row["waiting"]) === 1 ? "waits" : "wait"}, the oldest for ${age(Number(row["oldest"]))}`
      : `queue ${shown(String(row["name"]))}`,
    ...(Number(row["stranded"]) > 0
      ? [
          `${counted(row["stranded"])} ${Number(row["stranded"]) === 1 ? "is" : "are"} with a worker that died`,
        ]
      : []),
    dead > 0 ? `no worker is alive (${plural(dead, "is dead", "are dead")})` : "it has no worker",
  ];
  return parts.join(", ");
}

/**
 * When a tick is due is defined in code. Here it is known how far apart ticks have been: one that is missing for half as
 * long again, and a minute, is overdue.
 */
const schedules: PostgresCheck = {
  id: "schedules",
  title: "a schedule is overdue by its own past, or a run of it has been left by a process that died",
  async run(patient) {
    const rows = await orAbsent(() =>
      patient.look(`SELECT s.name, extract(epoch FROM clock_timestamp() - s.last) * 1000 AS ms, extract(epoch FROM p.widest) * 1000 AS widest, p.n,
  o.holder, extract(epoch FROM clock_timestamp() - o.until) * 1000 AS left_ms
FROM ${patient.server.own("schedule")} s
LEFT JOIN LATERAL (SELECT count(*) AS n, max(r.tick - r.previous) AS widest FROM (SELECT r.tick, r.previous FROM ${patient.server.own("schedule_run")} r
  WHERE r.schedule = s.name AND NOT r.manual AND r.previous IS NOT NULL ORDER BY r.tick DESC LIMIT 50) r) p ON true
LEFT JOIN LATERAL (SELECT r.holder, r.until FROM ${patient.server.own("schedule_run")} r WHERE r.schedule = s.name AND r.state IN ('running', 'waiting')
  AND r.until < clock_timestamp() - interval '1 minute' ORDER BY r.tick LIMIT 1) o ON true
WHERE NOT s.paused ORDER BY s.name LIMIT 1000`),
    );
    const name = (row: Row) => shown(String(row["name"]));
    const fix = (row: Row) =>
      `holdfast schedule show ${word(String(row["name"]))}   # its runs; is a process that has it running?`;
    const late = (row: Row) =>
      Number(row["n"]) >= 3 && Number(row["ms"]) > Number(row["widest"]) * 1.5 + 60_000;
    return [
      ...findings(
        "error",
        "Whoever runs the schedule takes over what was left. Nobody has: no process runs it any more.",
        rows
          .filter((row) => row["holder"] !== null)
          .map((row) => ({
            what: `a run of schedule ${name(row)} was left by ${shown(String(row["holder"]))} ${age(Number(row["left_ms"]))} ago, and nobody has taken it over`,
            fix: fix(row),
          })),
      ),
      ...findings(
        "error",
        "What it does every time has not been done. It is due again by the definition in your code.",
        rows
          .filter((row) => row["holder"] === null && late(row))
          .map((row) => ({
            what: `the last tick of schedule ${name(row)} was ${age(Number(row["ms"]))} ago; before, they were ${age(Number(row["widest"]))} apart at the most`,
            fix: fix(row),
          })),
      ),
    ];
  },
};

const looked = 10_000;

/** By the newest movement of each level, which is one look into an index. Of tables of the caller's it is not known which they are. */
const stockLedger: PostgresCheck = {
  id: "stock-ledger",
  title: `stock is not what its movements say (of ${looked.toLocaleString("en")} levels)`,
  async run(patient) {
    const rows = await orAbsent(() =>
      patient.look(`SELECT t.book, t.sku, t.location, t.on_hand, t.reserved, coalesce(m.balance, 0) AS balance, coalesce(r.open, 0) AS open
FROM (SELECT * FROM ${patient.server.own("stock_level")} WHERE NOT elsewhere ORDER BY id LIMIT ${looked}) t
LEFT JOIN LATERAL (SELECT m.balance, m.version FROM ${patient.server.own("stock_movement")} m WHERE m.level = t.id ORDER BY m.version DESC LIMIT 1) m ON true
LEFT JOIN LATERAL (SELECT sum(r.quantity) AS open FROM ${patient.server.own("stock_reserved")} r WHERE r.level = t.id) r ON true
WHERE t.on_hand <> coalesce(m.balance, 0) OR t.version <> coalesce(m.version, 0) OR t.reserved <> coalesce(r.open, 0) LIMIT 1000`),
    );
    return findings(
      "error",
      "It was changed by something that is no movement: a hand, a script, a restore of one table. What was confirmed can be sold twice, or never.",
      rows.map((row) => {
        const book = String(row["book"]) === "stock" ? "" : ` --name ${word(String(row["book"]))}`;
        const onHand =
          String(row["on_hand"]) === String(row["balance"])
            ? `${String(row["reserved"])} reserved, of which reservations explain ${String(row["open"])}`
            : `${String(row["on_hand"])} on hand, and ${String(row["balance"])} by the movements`;
        return {
          what: `stock of ${shown(String(row["sku"]))} at ${shown(String(row["location"]))}: ${onHand}`,
          fix: `holdfast stock reconcile ${word(String(row["sku"]))}${book}   # --repair sets it to what the movements say`,
        };
      }),
    );
  },
};

const quotaLedger: PostgresCheck = {
  id: "quota-ledger",
  title: `what is counted of a quota is not what its ledger, holds and grants say (of ${looked.toLocaleString("en")} subjects)`,
  async run(patient) {
    const rows = await orAbsent(() =>
      patient.look(`SELECT t.quota, t.subject, t.used, t.held, t.credit, coalesce(l.used, 0) AS line_used, coalesce(h.held, 0) AS holds,
  coalesce(g.credit, 0) AS grants
FROM (SELECT b.* FROM ${patient.server.own("quota_bucket")} b
  -- Of tables that were not migrated yet, too: they have no such columns.
  WHERE coalesce(to_jsonb(b)->>'moved_to', to_jsonb(b)->>'moved_from') IS NULL ORDER BY b.quota, b.subject LIMIT ${looked}) t
LEFT JOIN LATERAL (SELECT l.used, l.version FROM ${patient.server.own("quota_line")} l WHERE l.bucket = t.id ORDER BY l.version DESC LIMIT 1) l ON true
LEFT JOIN LATERAL (SELECT sum(h.amount) AS held FROM ${patient.server.own("quota_hold")} h WHERE h.quota = t.quota AND h.subject = t.subject) h ON true
LEFT JOIN LATERAL (SELECT sum(g.amount - g.spent) AS credit FROM ${patient.server.own("quota_grant")} g WHERE g.quota = t.quota AND g.subject = t.subject) g ON true
WHERE t.used <> coalesce(l.used, 0) OR t.version <> coalesce(l.version, 0) OR t.held <> coalesce(h.held, 0) OR t.credit <> coalesce(g.credit, 0) LIMIT 1000`),
    );
    return findings(
      "error",
      "It was changed by something that is no entry: a hand, a script, a restore of one table. What was granted can be used twice, or never.",
      rows.map((row) => {
        const differs = [
          ["used", "used", "line_used", "by its ledger"],
          ["held", "held", "holds", "by its holds"],
          ["of credit", "credit", "grants", "by its grants"],
        ].flatMap(([unit, has = "", says = "", by]) =>
          String(row[has]) === String(row[says])
            ? []
            : [`${String(row[has])} ${unit}, ${String(row[says])} ${by}`],
        );
        return {
          what: `quota ${shown(String(row["quota"]))} of ${shown(String(row["subject"]))}: ${differs.join("; ") || "lines of its ledger are missing"}`,
          fix: `holdfast quota reconcile ${word(String(row["quota"]))} ${word(String(row["subject"]))}   # --repair sets it to what the ledger says`,
        };
      }),
    );
  },
};

export const patternChecks: readonly PostgresCheck[] = [
  queueWorkers,
  failedJobs,
  schedules,
  stockLedger,
  quotaLedger,
];
