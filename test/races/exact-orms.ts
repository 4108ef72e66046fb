/** Flows without a race, on ORMs: Prisma, TypeORM, MikroORM, Sequelize. */
import assert from "node:assert/strict";
import { LockMode, OptimisticLockError } from "@mikro-orm/core";
import { type SqlEntityManager, defineEntity } from "@mikro-orm/postgresql";
import {
  DataTypes,
  type InferAttributes,
  type InferCreationAttributes,
  type Model,
  type Sequelize,
} from "sequelize";
import { type DataSource, EntitySchema, QueryFailedError } from "typeorm";
import { Prisma, type PrismaClient } from "../generated/prisma-races/client.ts";
import { type Exact, accepted, everywhere, number, postgresOnly } from "./race.ts";

const download = (prisma: PrismaClient, file: string) =>
  prisma.download.update({ where: { file }, data: { count: { increment: 1 } } });

const atomicUpdate: Exact = {
  title: "an atomic UPDATE",
  client: "prisma",
  engines: postgresOnly,
  tables: { download: "file text PRIMARY KEY, count int NOT NULL" },
  rows: ["INSERT INTO download VALUES ('a.zip', 0)"],
  correct: {
    actors: ({ prisma }) => ({
      A: () => download(prisma, "a.zip"),
      B: () => download(prisma, "a.zip"),
      C: () => download(prisma, "a.zip"),
    }),
  },
  async invariant(clients) {
    assert.equal(await number(clients, "SELECT count FROM download"), 3);
  },
};

async function buyTicket(prisma: PrismaClient, raffleId: number, holder: string): Promise<void> {
  for (let attempt = 1; ; attempt++) {
    try {
      return await prisma.$transaction(
        async (tx) => {
          const raffle = await tx.raffle.findUniqueOrThrow({ where: { id: raffleId } });
          const sold = await tx.raffleTicket.count({ where: { raffleId } });
          if (sold >= raffle.seats) throw new Error("Sold out");
          await tx.raffleTicket.create({ data: { raffleId, holder } });
        },
        { isolationLevel: "Serializable" },
      );
    } catch (error) {
      const again = error instanceof Prisma.PrismaClientKnownRequestError && error.code === "P2034";
      if (!again || attempt === 6) throw error;
    }
  }
}

const prismaSerializable: Exact = {
  title: "Serializable, tried again after P2034",
  client: "prisma",
  engines: postgresOnly,
  tables: {
    raffle: "id int PRIMARY KEY, seats int NOT NULL",
    raffle_ticket: "id serial PRIMARY KEY, raffle_id int NOT NULL REFERENCES raffle, holder text NOT NULL",
  },
  rows: [
    "INSERT INTO raffle VALUES (1, 2)",
    "INSERT INTO raffle_ticket (raffle_id, holder) VALUES (1, 'cy')",
  ],
  correct: {
    actors: ({ prisma }) => ({ A: () => buyTicket(prisma, 1, "ada"), B: () => buyTicket(prisma, 1, "bob") }),
  },
  async invariant(clients, results) {
    assert.equal(await number(clients, "SELECT count(*) FROM raffle_ticket"), 2, "tickets for 2 seats");
    assert.equal(accepted(results), 1);
  },
};

interface Tank {
  id: number;
  litres: number;
}

const Tank = new EntitySchema<Tank>({
  name: "Tank",
  tableName: "tank",
  columns: { id: { type: "int", primary: true }, litres: { type: "int" } },
});

const drain = (dataSource: DataSource, id: number, litres: number): Promise<void> =>
  dataSource.transaction(async (manager) => {
    const tank = await manager.findOneOrFail(Tank, { where: { id }, lock: { mode: "pessimistic_write" } });
    if (tank.litres < litres) throw new Error("Not enough");
    tank.litres -= litres;
    await manager.save(Tank, tank);
  });

const forUpdate: Exact = {
  title: "FOR UPDATE",
  client: "typeorm",
  engines: everywhere,
  tables: { tank: "id int PRIMARY KEY, litres int NOT NULL" },
  rows: ["INSERT INTO tank VALUES (1, 100)"],
  entities: { typeorm: [Tank] },
  correct: {
    actors: ({ dataSource }) => ({ A: () => drain(dataSource, 1, 60), B: () => drain(dataSource, 1, 70) }),
  },
  async invariant(clients, results) {
    const litres = await number(clients, "SELECT litres FROM tank");
    assert.ok(litres === 30 || litres === 40, `${litres} litres`);
    assert.equal(accepted(results), 1);
  },
};

interface Purse {
  id: number;
  balance: number;
}
interface PurseEntry {
  id: number;
  purseId: number;
  amount: number;
}

const Purse = new EntitySchema<Purse>({
  name: "Purse",
  tableName: "purse",
  columns: { id: { type: "int", primary: true }, balance: { type: "int" } },
});
const PurseEntry = new EntitySchema<PurseEntry>({
  name: "PurseEntry",
  tableName: "purse_entry",
  columns: {
    id: { type: "int", primary: true },
    purseId: { name: "purse_id", type: "int" },
    amount: { type: "int" },
  },
});

/** The entry first: if the balance does not allow it, neither stays. */
const pay = (dataSource: DataSource, entry: PurseEntry): Promise<void> =>
  dataSource.transaction(async (manager) => {
    await manager.insert(PurseEntry, entry);
    await manager.decrement(Purse, { id: entry.purseId }, "balance", entry.amount);
  });

const checkConstraint: Exact = {
  title: "a ledger with a CHECK constraint",
  client: "typeorm",
  engines: everywhere,
  tables: {
    purse: "id int PRIMARY KEY, balance int NOT NULL, CHECK (balance >= 0)",
    purse_entry: "id int PRIMARY KEY, purse_id int NOT NULL, amount int NOT NULL",
  },
  rows: ["INSERT INTO purse VALUES (1, 100)"],
  entities: { typeorm: [Purse, PurseEntry] },
  correct: {
    actors: ({ dataSource }) => ({
      A: () => pay(dataSource, { id: 1, purseId: 1, amount: 60 }),
      B: () => pay(dataSource, { id: 2, purseId: 1, amount: 70 }),
    }),
  },
  async invariant(clients, results) {
    const paid = await number(clients, "SELECT sum(amount) FROM purse_entry");
    assert.equal(await number(clients, "SELECT balance FROM purse"), 100 - paid);
    assert.equal(accepted(results), 1);
    const refusals = Object.values(results).flatMap((r) => (r.status === "rejected" ? [r.reason] : []));
    assert.ok(refusals.every((error) => error instanceof QueryFailedError));
  },
};

interface Author {
  id: number;
}
interface Book {
  id: number;
  authorId: number;
}

const Author = new EntitySchema<Author>({
  name: "Author",
  tableName: "author",
  columns: { id: { type: "int", primary: true } },
});
const Book = new EntitySchema<Book>({
  name: "Book",
  tableName: "book",
  columns: { id: { type: "int", primary: true }, authorId: { name: "author_id", type: "int" } },
});

const addBook = (dataSource: DataSource, book: Book): Promise<void> =>
  dataSource.transaction(async (manager) => {
    await manager.findOneByOrFail(Author, { id: book.authorId });
    await manager.insert(Book, book);
  });

const removeAuthor = (dataSource: DataSource, id: number): Promise<void> =>
  dataSource.transaction(async (manager) => {
    if (await manager.existsBy(Book, { authorId: id })) throw new Error("The author has books");
    await manager.delete(Author, { id });
  });

/** Both look first, and both looks may be old. It is the server that keeps the rule. */
const foreignKey: Exact = {
  title: "a foreign key decides",
  client: "typeorm",
  engines: everywhere,
  tables: {
    author: "id int PRIMARY KEY",
    book: "id int PRIMARY KEY, author_id int NOT NULL, FOREIGN KEY (author_id) REFERENCES author (id)",
  },
  rows: ["INSERT INTO author VALUES (1)"],
  entities: { typeorm: [Author, Book] },
  correct: {
    actors: ({ dataSource }) => ({
      add: () => addBook(dataSource, { id: 1, authorId: 1 }),
      remove: () => removeAuthor(dataSource, 1),
    }),
  },
  async invariant(clients, results) {
    const books = await number(clients, "SELECT count(*) FROM book");
    assert.equal(await number(clients, "SELECT count(*) FROM author"), books, "an author of each book");
    assert.equal(accepted(results), 1);
  },
};

const Vault = defineEntity({
  name: "Vault",
  tableName: "vault",
  properties: (p) => ({ id: p.integer().primary(), coins: p.integer() }),
});

const carry = (em: SqlEntityManager, from: number, to: number, coins: number): Promise<void> =>
  em.transactional(async (em) => {
    const vaults = await em.find(
      Vault,
      { id: { $in: [from, to] } },
      { orderBy: { id: "asc" }, lockMode: LockMode.PESSIMISTIC_WRITE },
    );
    const [source, target] = [from, to].map((id) => vaults.find((vault) => vault.id === id));
    if (!source || !target || source.coins < coins) throw new Error("Not enough");
    source.coins -= coins;
    target.coins += coins;
  });

const sortedLocks: Exact = {
  title: "two rows locked in one order",
  client: "mikro-orm",
  engines: everywhere,
  tables: { vault: "id int PRIMARY KEY, coins int NOT NULL" },
  rows: ["INSERT INTO vault VALUES (1, 100), (2, 100)"],
  entities: { mikroOrm: [Vault] },
  correct: {
    actors: ({ em }) => ({ A: () => carry(em.fork(), 1, 2, 30), B: () => carry(em.fork(), 2, 1, 50) }),
  },
  async invariant(clients, results) {
    assert.equal(await number(clients, "SELECT coins FROM vault WHERE id = 1"), 120);
    assert.equal(accepted(results), 2);
  },
};

const Recipe = defineEntity({
  name: "Recipe",
  tableName: "recipe",
  properties: (p) => ({ id: p.integer().primary(), steps: p.string(), version: p.integer().version() }),
});

/** Each attempt with an entity manager of its own, as the old one remembers the old row. */
async function addStep(em: SqlEntityManager, id: number, step: string): Promise<void> {
  for (let attempt = 1; ; attempt++) {
    const fork = em.fork();
    const recipe = await fork.findOneOrFail(Recipe, id);
    recipe.steps += `, ${step}`;
    try {
      await fork.flush();
      return;
    } catch (error) {
      if (!(error instanceof OptimisticLockError) || attempt === 5) throw error;
    }
  }
}

const versionedEntity: Exact = {
  title: "an entity with a version, tried again",
  client: "mikro-orm",
  engines: everywhere,
  tables: { recipe: "id int PRIMARY KEY, steps varchar(80) NOT NULL, version int NOT NULL" },
  rows: ["INSERT INTO recipe VALUES (1, 'boil', 1)"],
  entities: { mikroOrm: [Recipe] },
  correct: { actors: ({ em }) => ({ A: () => addStep(em, 1, "stir"), B: () => addStep(em, 1, "salt") }) },
  async invariant(clients) {
    const [recipe] = await clients.query("SELECT steps FROM recipe");
    assert.equal(String(recipe?.["steps"]).split(", ").length, 3, "steps");
  },
};

interface Plan extends Model<InferAttributes<Plan>, InferCreationAttributes<Plan>> {
  id: number;
  hours: number;
  revision: number;
}

const plans = (sequelize: Sequelize) =>
  sequelize.define<Plan>(
    "Plan",
    {
      id: { type: DataTypes.INTEGER, primaryKey: true },
      hours: { type: DataTypes.INTEGER },
      revision: { type: DataTypes.INTEGER },
    },
    { tableName: "work_plan", timestamps: false },
  );

async function addHours(sequelize: Sequelize, id: number, hours: number): Promise<void> {
  const Plan = plans(sequelize);
  for (let attempt = 1; attempt <= 5; attempt++) {
    const plan = await Plan.findByPk(id, { rejectOnEmpty: true });
    const [saved] = await Plan.update(
      { hours: plan.hours + hours, revision: plan.revision + 1 },
      { where: { id, revision: plan.revision } },
    );
    if (saved === 1) return;
  }
  throw new Error("Too many others change this plan");
}

const versionInWrite: Exact = {
  title: "a version that the write compares, tried again",
  client: "sequelize",
  engines: everywhere,
  tables: { work_plan: "id int PRIMARY KEY, hours int NOT NULL, revision int NOT NULL" },
  rows: ["INSERT INTO work_plan VALUES (1, 0, 1)"],
  correct: {
    actors: ({ sequelize }) => ({ A: () => addHours(sequelize, 1, 3), B: () => addHours(sequelize, 1, 5) }),
  },
  async invariant(clients) {
    assert.equal(await number(clients, "SELECT hours FROM work_plan"), 8, "hours");
  },
};

interface Shelf extends Model<InferAttributes<Shelf>, InferCreationAttributes<Shelf>> {
  id: number;
  boxes: number;
}

const shelves = (sequelize: Sequelize) =>
  sequelize.define<Shelf>(
    "Shelf",
    { id: { type: DataTypes.INTEGER, primaryKey: true }, boxes: { type: DataTypes.INTEGER } },
    { tableName: "shelf", timestamps: false },
  );

async function putBox(sequelize: Sequelize, id: number): Promise<void> {
  await sequelize.transaction(async (transaction) => {
    const shelf = await shelves(sequelize).findByPk(id, {
      transaction,
      lock: transaction.LOCK.UPDATE,
      rejectOnEmpty: true,
    });
    if (shelf.boxes >= 3) throw new Error("The shelf is full");
    await shelf.increment("boxes", { by: 1, transaction });
  });
}

const threeAtOnce: Exact = {
  title: "FOR UPDATE by three at once",
  client: "sequelize",
  engines: everywhere,
  tables: { shelf: "id int PRIMARY KEY, boxes int NOT NULL" },
  rows: ["INSERT INTO shelf VALUES (1, 1)"],
  correct: {
    actors: ({ sequelize }) => ({
      A: () => putBox(sequelize, 1),
      B: () => putBox(sequelize, 1),
      C: () => putBox(sequelize, 1),
    }),
  },
  async invariant(clients, results) {
    assert.equal(await number(clients, "SELECT boxes FROM shelf"), 3);
    assert.equal(accepted(results), 2);
  },
};

export const exactOrms: readonly Exact[] = [
  atomicUpdate,
  prismaSerializable,
  forUpdate,
  checkConstraint,
  foreignKey,
  sortedLocks,
  versionedEntity,
  versionInWrite,
  threeAtOnce,
];
