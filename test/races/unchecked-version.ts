import assert from "node:assert/strict";
import {
  DataTypes,
  type InferAttributes,
  type InferCreationAttributes,
  type Model,
  type Sequelize,
} from "sequelize";
import { type Race, accepted, everywhere } from "./race.ts";

interface Page extends Model<InferAttributes<Page>, InferCreationAttributes<Page>> {
  id: number;
  body: string;
  revision: number;
}

class Conflict extends Error {}

const pages = (sequelize: Sequelize) =>
  sequelize.define<Page>(
    "WikiPage",
    {
      id: { type: DataTypes.INTEGER, primaryKey: true },
      body: { type: DataTypes.STRING },
      revision: { type: DataTypes.INTEGER },
    },
    { tableName: "wiki_page", timestamps: false },
  );

interface Form {
  id: number;
  body: string;
  revision: number;
}

async function naive(sequelize: Sequelize, form: Form): Promise<void> {
  const page = await pages(sequelize).findByPk(form.id, { rejectOnEmpty: true });
  if (page.revision !== form.revision) throw new Conflict();
  await page.update({ body: form.body, revision: form.revision + 1 });
}

async function fixed(sequelize: Sequelize, { id, body, revision }: Form): Promise<void> {
  const [saved] = await pages(sequelize).update(
    { body, revision: revision + 1 },
    { where: { id, revision } },
  );
  if (saved === 0) throw new Conflict();
}

const ada = { id: 1, body: "by Ada", revision: 7 };
const bob = { id: 1, body: "by Bob", revision: 7 };

export const uncheckedVersion: Race = {
  title: "a version is compared, but not by the write",
  client: "sequelize",
  engines: everywhere,
  tables: { wiki_page: "id int PRIMARY KEY, body varchar(80) NOT NULL, revision int NOT NULL" },
  rows: ["INSERT INTO wiki_page VALUES (1, 'empty', 7)"],
  naive: { actors: ({ sequelize }) => ({ A: () => naive(sequelize, ada), B: () => naive(sequelize, bob) }) },
  fixed: { actors: ({ sequelize }) => ({ A: () => fixed(sequelize, ada), B: () => fixed(sequelize, bob) }) },
  async invariant(_clients, results) {
    assert.equal(accepted(results), 1, "edits of revision 7 that were accepted");
  },
  expects: "lost update",
};
