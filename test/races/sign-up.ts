import assert from "node:assert/strict";
import {
  type CreationOptional,
  DataTypes,
  type InferAttributes,
  type InferCreationAttributes,
  type Model,
  type Sequelize,
  UniqueConstraintError,
} from "sequelize";
import { type Race, accepted, everywhere, number } from "./race.ts";

interface User extends Model<InferAttributes<User>, InferCreationAttributes<User>> {
  id: CreationOptional<number>;
  email: string;
  name: string;
}

class EmailTaken extends Error {}

const users = (sequelize: Sequelize) =>
  sequelize.define<User>(
    "HedgeUser",
    {
      id: { type: DataTypes.INTEGER, primaryKey: true, autoIncrement: true },
      email: { type: DataTypes.STRING, allowNull: false },
      name: { type: DataTypes.STRING, allowNull: false },
    },
    { tableName: "hedge_user", timestamps: false },
  );

async function naive(sequelize: Sequelize, email: string, name: string): Promise<void> {
  const User = users(sequelize);
  if (await User.findOne({ where: { email } })) throw new EmailTaken();
  await User.create({ email, name });
}

async function fixed(sequelize: Sequelize, email: string, name: string): Promise<void> {
  try {
    await users(sequelize).create({ email, name });
  } catch (error) {
    if (error instanceof UniqueConstraintError) throw new EmailTaken();
    throw error;
  }
}

export const signUp: Race = {
  title: "the same person signs up twice",
  source: "hedgedoc 6875",
  client: "sequelize",
  engines: everywhere,
  tables: { hedge_user: "id serial PRIMARY KEY, email varchar(80) NOT NULL, name varchar(80) NOT NULL" },
  rows: [],
  naive: {
    actors: ({ sequelize }) => ({
      A: () => naive(sequelize, "ada@example.com", "Ada"),
      B: () => naive(sequelize, "ada@example.com", "Ada L."),
    }),
  },
  fixed: {
    migration: ["CREATE UNIQUE INDEX one_email ON hedge_user (email)"],
    actors: ({ sequelize }) => ({
      A: () => fixed(sequelize, "ada@example.com", "Ada"),
      B: () => fixed(sequelize, "ada@example.com", "Ada L."),
    }),
  },
  async invariant(clients, results) {
    assert.equal(await number(clients, "SELECT count(*) FROM hedge_user"), 1, "users with this address");
    assert.equal(accepted(results), 1);
  },
  expects: "phantom",
};
