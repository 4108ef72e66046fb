import assert from "node:assert/strict";
import type { Pool } from "pg";
import { type Scenario, one } from "./scenario.ts";

interface Document {
  title: string;
  body: string;
}

async function edit(pool: Pool, id: number, change: Partial<Document>): Promise<void> {
  const document = await one<Document>(pool, "SELECT title, body FROM document WHERE id = $1", [id]);
  const { title, body } = { ...document, ...change };
  await pool.query("UPDATE document SET title = $2, body = $3 WHERE id = $1", [id, title, body]);
}

export const scenario: Scenario = {
  title: "One changes the title, the other one the text",
  tables: "CREATE TABLE document (id int PRIMARY KEY, title text NOT NULL, body text NOT NULL)",
  rows: "DELETE FROM document; INSERT INTO document VALUES (1, 'Draft', '…')",
  actors: (pool) => ({
    A: () => edit(pool, 1, { title: "Report" }),
    B: () => edit(pool, 1, { body: "All is well." }),
  }),
  async invariant(pool) {
    const { title, body } = await one<Document>(pool, "SELECT title, body FROM document");
    assert.ok(title === "Report", "The title that A has saved is gone");
    assert.ok(body === "All is well.", "The text that B has saved is gone");
  },
};
