import assert from "node:assert/strict";
import type { Sequelize } from "sequelize";
import { type Race, accepted, number, postgresOnly } from "./race.ts";

/** Nothing of the rule is in the application: a trigger counts. */
async function addDevice(sequelize: Sequelize, owner: string, device: string): Promise<void> {
  await sequelize.transaction(async (transaction) => {
    const options = { replacements: { owner, device }, transaction };
    await sequelize.query("INSERT INTO device (owner, name) VALUES (:owner, :device)", options);
    await sequelize.query("INSERT INTO device_log (owner, name) VALUES (:owner, :device)", options);
  });
}

const trigger = (first: string): string[] => [
  `CREATE OR REPLACE FUNCTION at_most_two_devices() RETURNS trigger LANGUAGE plpgsql AS $$
   BEGIN
     ${first}
     IF (SELECT count(*) FROM device WHERE owner = NEW.owner) >= 2 THEN
       RAISE EXCEPTION 'too many devices';
     END IF;
     RETURN NEW;
   END $$`,
  `CREATE TRIGGER at_most_two_devices BEFORE INSERT ON device
   FOR EACH ROW EXECUTE FUNCTION at_most_two_devices()`,
];

const actors = (sequelize: Sequelize) => ({
  A: () => addDevice(sequelize, "ada", "phone"),
  B: () => addDevice(sequelize, "ada", "watch"),
});

export const triggerLimit: Race = {
  title: "a trigger counts what others have not committed yet",
  client: "sequelize",
  engines: postgresOnly,
  tables: {
    device_owner: "name text PRIMARY KEY",
    device: "owner text NOT NULL, name text NOT NULL",
    device_log: "owner text NOT NULL, name text NOT NULL",
  },
  rows: ["INSERT INTO device_owner VALUES ('ada')", "INSERT INTO device VALUES ('ada', 'laptop')"],
  naive: { migration: trigger(""), actors: ({ sequelize }) => actors(sequelize) },
  fixed: {
    migration: trigger("PERFORM 1 FROM device_owner WHERE name = NEW.owner FOR UPDATE;"),
    actors: ({ sequelize }) => actors(sequelize),
  },
  async invariant(clients, results) {
    assert.equal(await number(clients, "SELECT count(*) FROM device"), 2, "devices");
    assert.equal(accepted(results), 1);
  },
};
