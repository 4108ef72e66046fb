/** Queues, schedules, stock and quotas: what stands still, and what does not add up. The same for every kind of server. */
import { HoldfastError } from "holdfast";
import { type QueueInfo, jobs, queue, queues, workers } from "holdfast/queue";
import { type RunInfo, runs, schedules } from "holdfast/schedule";
import { age } from "../terminal.ts";
import { plural, shown, word } from "../text.ts";
import { type Check, findings, orAbsent, short } from "./check.ts";
import type { Patient } from "./patient.ts";

/** Counts of the library end there. */
const mostCounted = 100_000;
const counted = (n: number): string =>
  n >= mostCounted ? `${mostCounted.toLocaleString("en")} jobs or more` : plural(n, "job");

/** What is not there, or not yet as this version has it, is told by the check of migrations. */
async function orMissing<T>(ask: () => Promise<readonly T[]>): Promise<readonly T[]> {
  try {
    return await orAbsent(ask);
  } catch (error) {
    if (error instanceof HoldfastError && error.code === "HF_SCHEMA_MISSING") return [];
    throw error;
  }
}

const failedJobs: Check<Patient> = {
  id: "failed-jobs",
  title: "jobs have failed for good",
  async run({ server: { hf } }) {
    const found = await orMissing(async () => {
      const failing = (await queues(hf)).filter(({ failed }) => failed > 0);
      return Promise.all(
        failing.map(async ({ name, failed }) => {
          const [first] = await queue(hf, name).failed({ limit: 1 });
          return { name, failed, first };
        }),
      );
    });
    return findings(
      "warning",
      "They have had all of their attempts, and are not tried again by themselves.",
      found.map(({ name, failed, first }) => ({
        what: `${counted(failed)} of queue ${shown(name)} failed${first ? `; the first of them ${age(Math.max(0, Date.now() - first.failedAt))} ago: ${short(first.error, 80)}` : ""}`,
        fix: `holdfast queue show ${word(name)}   # why; then holdfast queue retry, or discard`,
      })),
    );
  },
};

/** As long as a deployment may take. */
const idleMs = 60_000;
/** Of jobs whose time has come and that nobody has put with those that wait: no more than people want to know. */
const mostDue = 1000;

interface Standing extends QueueInfo {
  /** Workers that have died. */
  readonly dead: number;
  /** Jobs that these had. */
  readonly stranded: number;
}

async function standings({ server: { hf } }: Patient): Promise<Standing[]> {
  const [all, crew] = await Promise.all([queues(hf), workers(hf)]);
  return Promise.all(
    all.map(async (info) => {
      const dead = crew.filter((each) => each.queue === info.name && !each.alive);
      const stranded = dead.reduce((sum, each) => sum + each.jobs, 0);
      const page =
        info.delayed > 0 ? await jobs(hf, info.name, { state: "delayed", limit: mostDue }) : undefined;
      // By the database's clock: since it came, so much time has passed.
      const due = (page?.jobs ?? [])
        .map(({ at, ageMs, runAt = Infinity }) => at + ageMs - runAt)
        .filter((late) => late >= 0);
      return {
        ...info,
        waiting: info.waiting - stranded + due.length,
        oldest: Math.max(info.oldest ?? 0, ...due),
        dead: dead.length,
        stranded,
      };
    }),
  );
}

const queueWorkers: Check<Patient> = {
  id: "queue-workers",
  title: "jobs have waited for more than a minute, and no worker is alive; or the queue is paused",
  async run(patient) {
    const all = await orMissing(() => standings(patient));
    const waiting = all.filter((each) => each.waiting > 0 && (each.oldest ?? 0) >= idleMs);
    const stuck = all.filter((each) => each.stranded > 0 && !waiting.includes(each));
    const idle = [...waiting, ...stuck].filter((each) => each.workers === 0);
    return [
      ...findings(
        "error",
        "Nobody works on them. What a worker had that died comes back as soon as another one looks.",
        idle
          .filter((each) => !each.paused)
          .map((each) => ({ what: still(each), fix: "Start a worker: queue(hf, name).work(handler)" })),
      ),
      ...findings(
        "hint",
        "No worker claims anything of it before it is resumed.",
        waiting
          .filter((each) => each.paused)
          .map((each) => ({
            what: `queue ${shown(each.name)} is paused, and ${counted(each.waiting)} wait in it, the oldest for ${age(each.oldest ?? 0)}`,
            fix: `holdfast queue resume ${word(each.name)}`,
          })),
      ),
    ];
  },
};

function still({ name, waiting, oldest = 0, stranded, dead }: Standing): string {
  const parts = [
    waiting > 0
      ? `${counted(waiting)} of queue ${shown(name)} ${waiting === 1 ? "waits" : "wait"}, the oldest for ${age(oldest)}`
      : `queue ${shown(name)}`,
    ...(stranded > 0
      ? [`${counted(stranded)} ${stranded === 1 ? "is" : "are"} with a worker that died`]
      : []),
    dead > 0 ? `no worker is alive (${plural(dead, "is dead", "are dead")})` : "it has no worker",
  ];
  return parts.join(", ");
}

const minute = 60_000;
const isOpen = ({ state }: RunInfo): boolean => state === "running" || state === "waiting";

/** How far apart ticks have been, at the most; undefined: there are too few to tell. */
function widest(newest: readonly RunInfo[]): number | undefined {
  const ticks = newest.filter(({ manual }) => !manual).map(({ tick }) => tick.getTime());
  const gaps = ticks.slice(1).map((tick, i) => Math.abs((ticks[i] ?? tick) - tick));
  return gaps.length < 2 ? undefined : Math.max(...gaps);
}

/**
 * When a tick is due is defined in code. Here it is known how far apart ticks have been: one that is missing for half as
 * long again, and a minute, is overdue.
 */
const schedulesAtWork: Check<Patient> = {
  id: "schedules",
  title: "a schedule is overdue by its own past, or a run of it has been left by a process that died",
  async run({ server: { hf } }) {
    const found = await orMissing(async () => {
      const open = (await schedules(hf)).filter(({ paused }) => !paused);
      const now = Date.now();
      return Promise.all(
        open.map(async ({ name, last }) => {
          const newest = await runs(hf, name, { limit: 50 });
          const left = newest.findLast((run) => isOpen(run) && run.until.getTime() < now - minute);
          return { name, left, now, apart: widest(newest), ms: now - last.getTime() };
        }),
      );
    });
    const fix = (name: string) =>
      `holdfast schedule show ${word(name)}   # its runs; is a process that has it running?`;
    return [
      ...findings(
        "error",
        "Whoever runs the schedule takes over what was left. Nobody has: no process runs it any more.",
        found.flatMap(({ name, left, now }) =>
          left
            ? [
                {
                  what: `a run of schedule ${shown(name)} was left by ${shown(left.holder)} ${age(now - left.until.getTime())} ago, and nobody has taken it over`,
                  fix: fix(name),
                },
              ]
            : [],
        ),
      ),
      ...findings(
        "error",
        "What it does every time has not been done. It is due again by the definition in your code.",
        found.flatMap(({ name, left, apart, ms }) =>
          left === undefined && apart !== undefined && ms > apart * 1.5 + minute
            ? [
                {
                  what: `the last tick of schedule ${shown(name)} was ${age(ms)} ago; before, they were ${age(apart)} apart at the most`,
                  fix: fix(name),
                },
              ]
            : [],
        ),
      ),
    ];
  },
};

const looked = 10_000;

/**
 * By the newest movement of each level, which is one look into an index: `holdfast stock reconcile` reads all of them. The tables
 * are the same everywhere. Of tables of the caller's it is not known which they are.
 */
const stockLedger: Check<Patient> = {
  id: "stock-ledger",
  title: `stock is not what its movements say (of ${looked.toLocaleString("en")} levels)`,
  async run({ server, look }) {
    const rows = await orMissing(() =>
      look(`SELECT * FROM (SELECT t.book, t.sku, t.location, t.on_hand, t.reserved, t.version,
  coalesce((SELECT m.balance FROM ${server.own("stock_movement")} m WHERE m.level = t.id ORDER BY m.version DESC LIMIT 1), 0) AS balance,
  coalesce((SELECT max(m.version) FROM ${server.own("stock_movement")} m WHERE m.level = t.id), 0) AS newest,
  coalesce((SELECT sum(r.quantity) FROM ${server.own("stock_reserved")} r WHERE r.level = t.id), 0) AS kept
  FROM (SELECT * FROM ${server.own("stock_level")} WHERE NOT elsewhere ORDER BY id LIMIT ${looked}) t) x
WHERE on_hand <> balance OR version <> newest OR reserved <> kept LIMIT 1000`),
    );
    return findings(
      "error",
      "It was changed by something that is no movement: a hand, a script, a restore of one table. What was confirmed can be sold twice, or never.",
      rows.map((row) => {
        const book = String(row["book"]) === "stock" ? "" : ` --name ${word(String(row["book"]))}`;
        const onHand =
          String(row["on_hand"]) === String(row["balance"])
            ? `${String(row["reserved"])} reserved, of which reservations explain ${String(row["kept"])}`
            : `${String(row["on_hand"])} on hand, and ${String(row["balance"])} by the movements`;
        return {
          what: `stock of ${shown(String(row["sku"]))} at ${shown(String(row["location"]))}: ${onHand}`,
          fix: `holdfast stock reconcile ${word(String(row["sku"]))}${book}   # --repair sets it to what the movements say`,
        };
      }),
    );
  },
};

const quotaLedger: Check<Patient> = {
  id: "quota-ledger",
  title: `what is counted of a quota is not what its ledger, holds and grants say (of ${looked.toLocaleString("en")} subjects)`,
  async run({ server, look }) {
    const own = (alias: string) => `${alias}.quota = t.quota AND ${alias}.subject = t.subject`;
    const rows = await orMissing(() =>
      look(`SELECT * FROM (SELECT t.quota, t.subject, t.used, t.held, t.credit, t.version,
  coalesce((SELECT l.used FROM ${server.own("quota_line")} l WHERE l.bucket = t.id ORDER BY l.version DESC LIMIT 1), 0) AS line_used,
  coalesce((SELECT max(l.version) FROM ${server.own("quota_line")} l WHERE l.bucket = t.id), 0) AS newest,
  coalesce((SELECT sum(h.amount) FROM ${server.own("quota_hold")} h WHERE ${own("h")}), 0) AS holds,
  coalesce((SELECT sum(g.amount - g.spent) FROM ${server.own("quota_grant")} g WHERE ${own("g")}), 0) AS granted
  FROM (SELECT * FROM ${server.own("quota_bucket")} WHERE moved_to IS NULL AND moved_from IS NULL ORDER BY quota, subject LIMIT ${looked}) t) x
WHERE used <> line_used OR version <> newest OR held <> holds OR credit <> granted LIMIT 1000`),
    );
    return findings(
      "error",
      "It was changed by something that is no entry: a hand, a script, a restore of one table. What was granted can be used twice, or never.",
      rows.map((row) => {
        const differs = [
          ["used", "used", "line_used", "by its ledger"],
          ["held", "held", "holds", "by its holds"],
          ["of credit", "credit", "granted", "by its grants"],
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

export const patternChecks: readonly Check<Patient>[] = [
  queueWorkers,
  failedJobs,
  schedulesAtWork,
  stockLedger,
  quotaLedger,
];
