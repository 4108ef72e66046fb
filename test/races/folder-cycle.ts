import assert from "node:assert/strict";
import { type DataSource, type EntityManager, EntitySchema } from "typeorm";
import { type Race, accepted, everywhere } from "./race.ts";

interface Drive {
  id: number;
}
interface Folder {
  id: number;
  driveId: number;
  parentId: number | null;
}

const Drive = new EntitySchema<Drive>({
  name: "Drive",
  tableName: "drive",
  columns: { id: { type: "int", primary: true } },
});
const Folder = new EntitySchema<Folder>({
  name: "Folder",
  tableName: "folder",
  columns: {
    id: { type: "int", primary: true },
    driveId: { name: "drive_id", type: "int" },
    parentId: { name: "parent_id", type: "int", nullable: true },
  },
});

async function moveUnlessInside(manager: EntityManager, id: number, target: number): Promise<void> {
  let at: number | null = target;
  while (at !== null) {
    if (at === id) throw new Error("A folder cannot be moved into itself");
    const { parentId }: Folder = await manager.findOneByOrFail(Folder, { id: at });
    at = parentId;
  }
  await manager.update(Folder, { id }, { parentId: target });
}

const naive = (dataSource: DataSource, id: number, target: number): Promise<void> =>
  dataSource.transaction((manager) => moveUnlessInside(manager, id, target));

const fixed = (dataSource: DataSource, id: number, target: number): Promise<void> =>
  dataSource.transaction(async (manager) => {
    await manager.findOneOrFail(Drive, { where: { id: 1 }, lock: { mode: "pessimistic_write" } });
    await moveUnlessInside(manager, id, target);
  });

export const folderCycle: Race = {
  title: "two folders are moved into each other",
  client: "typeorm",
  engines: everywhere,
  tables: {
    drive: "id int PRIMARY KEY",
    folder: "id int PRIMARY KEY, drive_id int NOT NULL, parent_id int",
  },
  rows: ["INSERT INTO drive VALUES (1)", "INSERT INTO folder VALUES (1, 1, NULL), (2, 1, 1), (3, 1, 1)"],
  entities: { typeorm: [Drive, Folder] },
  naive: {
    actors: ({ dataSource }) => ({ A: () => naive(dataSource, 2, 3), B: () => naive(dataSource, 3, 2) }),
  },
  fixed: {
    actors: ({ dataSource }) => ({ A: () => fixed(dataSource, 2, 3), B: () => fixed(dataSource, 3, 2) }),
  },
  async invariant(clients, results) {
    const rows = await clients.query("SELECT id, parent_id FROM folder");
    const parents = new Map(rows.map((row) => [row["id"], row["parent_id"]]));
    assert.ok(parents.get(2) === 1 || parents.get(3) === 1, "a folder that no longer hangs from the root");
    assert.equal(accepted(results), 1);
  },
  expects: "write skew",
};
