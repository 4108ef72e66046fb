import assert from "node:assert/strict";
import { LockMode } from "@mikro-orm/core";
import { type SqlEntityManager, defineEntity } from "@mikro-orm/postgresql";
import { type Race, accepted, everywhere, number } from "./race.ts";

const Project = defineEntity({
  name: "Project",
  tableName: "project",
  properties: (p) => ({ id: p.integer().primary(), deleted: p.boolean() }),
});
const Task = defineEntity({
  name: "Task",
  tableName: "project_task",
  properties: (p) => ({ id: p.integer().primary(), projectId: p.integer(), title: p.string() }),
});

/** With `lock` the same two functions exclude each other. */
interface Options {
  lockMode?: LockMode;
}

const addTask = (em: SqlEntityManager, projectId: number, title: string, options: Options): Promise<void> =>
  em.transactional(async (em) => {
    const project = await em.findOneOrFail(Project, projectId, options);
    if (project.deleted) throw new Error("The project was deleted");
    em.persist(em.create(Task, { id: 1, projectId, title }));
  });

const remove = (em: SqlEntityManager, projectId: number, options: Options): Promise<void> =>
  em.transactional(async (em) => {
    const project = await em.findOneOrFail(Project, projectId, options);
    if ((await em.count(Task, { projectId })) > 0) throw new Error("The project has tasks");
    project.deleted = true;
  });

const actors = (em: SqlEntityManager, options: Options) => ({
  add: () => addTask(em.fork(), 1, "write it down", options),
  remove: () => remove(em.fork(), 1, options),
});

export const softDelete: Race = {
  title: "a project is deleted softly while a task is added",
  client: "mikro-orm",
  engines: everywhere,
  tables: {
    project: "id int PRIMARY KEY, deleted boolean NOT NULL",
    project_task:
      "id int PRIMARY KEY, project_id int NOT NULL REFERENCES project (id), title varchar(80) NOT NULL",
  },
  rows: ["INSERT INTO project VALUES (1, false)"],
  entities: { mikroOrm: [Project, Task] },
  naive: { actors: ({ em }) => actors(em, {}) },
  fixed: { actors: ({ em }) => actors(em, { lockMode: LockMode.PESSIMISTIC_WRITE }) },
  async invariant(clients, results) {
    const orphans = await number(
      clients,
      "SELECT count(*) FROM project_task t JOIN project p ON p.id = t.project_id WHERE p.deleted",
    );
    assert.equal(orphans, 0, "tasks of a project that is gone");
    assert.equal(accepted(results), 1);
  },
  expects: "write skew",
};
