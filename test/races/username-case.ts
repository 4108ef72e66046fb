import assert from "node:assert/strict";
import { type DataSource, EntitySchema, QueryFailedError } from "typeorm";
import { sqlState } from "./app.ts";
import { type Race, accepted, number, postgresOnly } from "./race.ts";

interface Member {
  id: number;
  name: string;
}

const Member = new EntitySchema<Member>({
  name: "ForumMember",
  tableName: "forum_member",
  columns: { id: { type: "int", primary: true }, name: { type: "text", unique: true } },
});

class NameTaken extends Error {}

/** There is a unique constraint, but `Ada` and `ada` are two names to it. */
async function naive(dataSource: DataSource, id: number, name: string): Promise<void> {
  const members = dataSource.getRepository(Member);
  const taken = await members
    .createQueryBuilder("member")
    .where("lower(member.name) = lower(:name)", { name })
    .getOne();
  if (taken) throw new NameTaken();
  const member = await members.findOneByOrFail({ id });
  member.name = name;
  await members.save(member);
}

async function fixed(dataSource: DataSource, id: number, name: string): Promise<void> {
  try {
    await dataSource.getRepository(Member).update({ id }, { name });
  } catch (error) {
    if (error instanceof QueryFailedError && sqlState(error) === "23505") throw new NameTaken();
    throw error;
  }
}

export const usernameCase: Race = {
  title: "two names that differ in their case only",
  client: "typeorm",
  engines: postgresOnly,
  tables: { forum_member: "id int PRIMARY KEY, name text NOT NULL UNIQUE" },
  rows: ["INSERT INTO forum_member VALUES (1, 'first'), (2, 'second')"],
  entities: { typeorm: [Member] },
  naive: {
    actors: ({ dataSource }) => ({
      A: () => naive(dataSource, 1, "Ada"),
      B: () => naive(dataSource, 2, "ada"),
    }),
  },
  fixed: {
    migration: ["CREATE UNIQUE INDEX one_name ON forum_member (lower(name))"],
    actors: ({ dataSource }) => ({
      A: () => fixed(dataSource, 1, "Ada"),
      B: () => fixed(dataSource, 2, "ada"),
    }),
  },
  async invariant(clients, results) {
    assert.equal(await number(clients, "SELECT count(DISTINCT lower(name)) FROM forum_member"), 2, "names");
    assert.equal(accepted(results), 1);
  },
  expects: "write skew",
};
