import assert from "node:assert/strict";
import {
  DataTypes,
  type InferAttributes,
  type InferCreationAttributes,
  type Model,
  type Sequelize,
} from "sequelize";
import { type Race, everywhere, number } from "./race.ts";

interface Order extends Model<InferAttributes<Order>, InferCreationAttributes<Order>> {
  id: number;
  state: string;
  total: number;
}
interface LineItem extends Model<InferAttributes<LineItem>, InferCreationAttributes<LineItem>> {
  id: number;
  orderId: number;
  price: number;
}

function models(sequelize: Sequelize) {
  const options = { timestamps: false, underscored: true };
  return {
    Order: sequelize.define<Order>(
      "SpreeOrder",
      {
        id: { type: DataTypes.INTEGER, primaryKey: true },
        state: { type: DataTypes.STRING },
        total: { type: DataTypes.INTEGER },
      },
      { ...options, tableName: "spree_order" },
    ),
    LineItem: sequelize.define<LineItem>(
      "SpreeLineItem",
      {
        id: { type: DataTypes.INTEGER, primaryKey: true },
        orderId: { type: DataTypes.INTEGER },
        price: { type: DataTypes.INTEGER },
      },
      { ...options, tableName: "spree_line_item" },
    ),
  };
}

const naive = {
  async addItem(sequelize: Sequelize, item: { id: number; orderId: number; price: number }): Promise<void> {
    const { Order, LineItem } = models(sequelize);
    await sequelize.transaction(async (transaction) => {
      const order = await Order.findByPk(item.orderId, { transaction });
      if (order?.state !== "cart") throw new Error("The order is complete");
      await LineItem.create(item, { transaction });
    });
  },

  async finalize(sequelize: Sequelize, orderId: number): Promise<void> {
    const { Order, LineItem } = models(sequelize);
    await sequelize.transaction(async (transaction) => {
      const order = await Order.findByPk(orderId, { transaction, rejectOnEmpty: true });
      const total = await LineItem.sum("price", { where: { orderId }, transaction });
      await order.update({ state: "complete", total }, { transaction });
    });
  },
};

const fixed = {
  async addItem(sequelize: Sequelize, item: { id: number; orderId: number; price: number }): Promise<void> {
    const { Order, LineItem } = models(sequelize);
    await sequelize.transaction(async (transaction) => {
      const order = await Order.findByPk(item.orderId, { transaction, lock: transaction.LOCK.UPDATE });
      if (order?.state !== "cart") throw new Error("The order is complete");
      await LineItem.create(item, { transaction });
    });
  },

  async finalize(sequelize: Sequelize, orderId: number): Promise<void> {
    const { Order, LineItem } = models(sequelize);
    await sequelize.transaction(async (transaction) => {
      const order = await Order.findByPk(orderId, {
        transaction,
        lock: transaction.LOCK.UPDATE,
        rejectOnEmpty: true,
      });
      const total = await LineItem.sum("price", { where: { orderId }, transaction });
      await order.update({ state: "complete", total }, { transaction });
    });
  },
};

const item = { id: 2, orderId: 1, price: 7 };

export const finalize: Race = {
  title: "an item is added while the order is completed",
  source: "spree 11286",
  client: "sequelize",
  engines: everywhere,
  tables: {
    spree_order: "id int PRIMARY KEY, state varchar(20) NOT NULL, total int NOT NULL",
    spree_line_item: "id int PRIMARY KEY, order_id int NOT NULL, price int NOT NULL",
  },
  rows: ["INSERT INTO spree_order VALUES (1, 'cart', 0)", "INSERT INTO spree_line_item VALUES (1, 1, 5)"],
  naive: {
    actors: ({ sequelize }) => ({
      add: () => naive.addItem(sequelize, item),
      finalize: () => naive.finalize(sequelize, 1),
    }),
  },
  fixed: {
    actors: ({ sequelize }) => ({
      add: () => fixed.addItem(sequelize, item),
      finalize: () => fixed.finalize(sequelize, 1),
    }),
  },
  async invariant(clients) {
    assert.equal(await number(clients, "SELECT count(*) FROM spree_order WHERE state = 'complete'"), 1);
    const items = await number(clients, "SELECT sum(price) FROM spree_line_item");
    assert.equal(
      await number(clients, "SELECT total FROM spree_order"),
      items,
      "what is paid is what is sent",
    );
  },
  expects: "write skew",
};
