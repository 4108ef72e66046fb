import assert from "node:assert/strict";
import { and, count, eq } from "drizzle-orm";
import type { NodePgDatabase } from "drizzle-orm/node-postgres";
import { integer, pgTable, text } from "drizzle-orm/pg-core";
import { type Race, accepted, number, postgresOnly } from "./race.ts";

const team = pgTable("team", { id: integer().primaryKey() });
const member = pgTable("team_member", {
  teamId: integer("team_id").notNull(),
  name: text().notNull(),
  role: text().notNull(),
});

type Tx = Parameters<Parameters<NodePgDatabase["transaction"]>[0]>[0];

async function leaveUnlessLast(tx: Tx, teamId: number, name: string): Promise<void> {
  const [admins] = await tx
    .select({ n: count() })
    .from(member)
    .where(and(eq(member.teamId, teamId), eq(member.role, "admin")));
  if ((admins?.n ?? 0) <= 1) throw new Error("The last admin cannot leave");
  await tx.delete(member).where(and(eq(member.teamId, teamId), eq(member.name, name)));
}

/** Each locks the row that it deletes. What was counted is the other one's. */
async function naive(db: NodePgDatabase, teamId: number, name: string): Promise<void> {
  await db.transaction(async (tx) => {
    await tx
      .select()
      .from(member)
      .where(and(eq(member.teamId, teamId), eq(member.name, name)))
      .for("update");
    await leaveUnlessLast(tx, teamId, name);
  });
}

async function fixed(db: NodePgDatabase, teamId: number, name: string): Promise<void> {
  await db.transaction(async (tx) => {
    await tx.select().from(team).where(eq(team.id, teamId)).for("update");
    await leaveUnlessLast(tx, teamId, name);
  });
}

export const lastAdmin: Race = {
  title: "both admins leave the team",
  client: "drizzle",
  engines: postgresOnly,
  tables: {
    team: "id int PRIMARY KEY",
    team_member: "team_id int NOT NULL, name text NOT NULL, role text NOT NULL, PRIMARY KEY (team_id, name)",
  },
  rows: [
    "INSERT INTO team VALUES (1)",
    "INSERT INTO team_member VALUES (1, 'ada', 'admin'), (1, 'bob', 'admin'), (1, 'cy', 'guest')",
  ],
  naive: {
    actors: ({ drizzle: db }) => ({ A: () => naive(db, 1, "ada"), B: () => naive(db, 1, "bob") }),
  },
  fixed: {
    actors: ({ drizzle: db }) => ({ A: () => fixed(db, 1, "ada"), B: () => fixed(db, 1, "bob") }),
  },
  async invariant(clients, results) {
    const admins = await number(clients, "SELECT count(*) FROM team_member WHERE role = 'admin'");
    assert.equal(admins, 1, "admins of the team");
    assert.equal(accepted(results), 1);
  },
  expects: "write skew",
};
