import assert from "node:assert/strict";
import { LockMode } from "@mikro-orm/core";
import { type SqlEntityManager, defineEntity } from "@mikro-orm/postgresql";
import { type Race, everywhere, number } from "./race.ts";

const Job = defineEntity({
  name: "MailJob",
  tableName: "mail_job",
  properties: (p) => ({ id: p.integer().primary(), state: p.string() }),
});
const Run = defineEntity({
  name: "MailJobRun",
  tableName: "mail_job_run",
  properties: (p) => ({ jobId: p.integer().primary(), worker: p.string().primary() }),
});

/** The lock comes after the look: whoever had to wait goes on with a job that is done. */
async function naive(em: SqlEntityManager, worker: string): Promise<void> {
  await em.transactional(async (em) => {
    const job = await em.findOne(Job, { state: "ready" }, { orderBy: { id: "asc" } });
    if (!job) return;
    await em.lock(job, LockMode.PESSIMISTIC_WRITE);
    em.persist(em.create(Run, { jobId: job.id, worker }));
    job.state = "done";
  });
}

async function fixed(em: SqlEntityManager, worker: string): Promise<void> {
  await em.transactional(async (em) => {
    const job = await em.findOne(
      Job,
      { state: "ready" },
      { orderBy: { id: "asc" }, lockMode: LockMode.PESSIMISTIC_PARTIAL_WRITE },
    );
    if (!job) return;
    em.persist(em.create(Run, { jobId: job.id, worker }));
    job.state = "done";
  });
}

export const jobTwice: Race = {
  title: "a job is locked after it was chosen",
  client: "mikro-orm",
  engines: everywhere,
  tables: {
    mail_job: "id int PRIMARY KEY, state varchar(20) NOT NULL",
    mail_job_run: "job_id int NOT NULL, worker varchar(20) NOT NULL, PRIMARY KEY (job_id, worker)",
  },
  rows: ["INSERT INTO mail_job VALUES (1, 'ready'), (2, 'ready')"],
  entities: { mikroOrm: [Job, Run] },
  naive: { actors: ({ em }) => ({ A: () => naive(em.fork(), "A"), B: () => naive(em.fork(), "B") }) },
  fixed: { actors: ({ em }) => ({ A: () => fixed(em.fork(), "A"), B: () => fixed(em.fork(), "B") }) },
  async invariant(clients) {
    assert.equal(
      await number(clients, "SELECT count(DISTINCT job_id) FROM mail_job_run"),
      2,
      "jobs that ran",
    );
    assert.equal(await number(clients, "SELECT count(*) FROM mail_job_run"), 2, "mails sent");
  },
  expects: "lost update",
};
