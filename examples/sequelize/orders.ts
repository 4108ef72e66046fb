/** A quota, stock and a queue in Sequelize's own transactions. */
import { holdfast } from "holdfast";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { fromSequelize } from "holdfast/sequelize";
import { stock } from "holdfast/stock";
import {
  type CreationOptional,
  DataTypes,
  type InferAttributes,
  type InferCreationAttributes,
  type Model,
  Sequelize,
} from "sequelize";
import { type Orders, type Receipt, daily, start } from "../orders.ts";
import { patient } from "../uploads.ts";

interface Purchase extends Model<InferAttributes<Purchase>, InferCreationAttributes<Purchase>> {
  id: CreationOptional<string>;
  userId: string;
  sku: string;
  receipt: CreationOptional<boolean>;
}

export async function open(url: string): Promise<Orders> {
  const sequelize = new Sequelize(url, { logging: false });
  const purchases = sequelize.define<Purchase>(
    "purchase",
    {
      id: { type: DataTypes.BIGINT, primaryKey: true, autoIncrement: true },
      userId: { type: DataTypes.TEXT, allowNull: false },
      sku: { type: DataTypes.TEXT, allowNull: false },
      receipt: { type: DataTypes.BOOLEAN, allowNull: false, defaultValue: false },
    },
    { tableName: "purchase", underscored: true, timestamps: false },
  );
  const hf = holdfast(fromSequelize(sequelize), patient);
  const limit = quota(hf, daily);
  const shelf = stock(hf);
  const receipts = queue<Receipt>(hf, "receipts");
  return {
    order: (userId, sku) =>
      sequelize.transaction(async (transaction) => {
        const { id } = await purchases.create({ userId, sku }, { transaction });
        await limit.consume(userId, 1, { tx: transaction });
        await shelf.decrease(sku, 1, { tx: transaction, source: "ORDER" });
        await receipts.enqueue({ orderId: id }, { tx: transaction });
      }),
    work: () =>
      receipts.work((job) =>
        sequelize.transaction(async (transaction) => {
          await purchases.update({ receipt: true }, { where: { id: job.payload.orderId }, transaction });
          await job.complete(transaction);
        }),
      ),
    async close() {
      await hf.close();
      await sequelize.close();
    },
  };
}

await start(import.meta.url, open);
