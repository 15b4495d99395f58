"""A small convolutional network learns to read digits, on any number of processes.

    hasten launch --cpu --num_processes 2 examples/digits.py

`digits_plain.py` is the same loop in plain PyTorch; compare them with `diff examples/digits_plain.py examples/digits.py`.
"""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hasten import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)

# 1,797 images of 8 x 8 pixels; a fifth is kept for the test.
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
train_images, test_images, train_labels, test_labels = train_test_split(images, labels, test_size=0.2, random_state=0)
train_loader = DataLoader(TensorDataset(train_images, train_labels), batch_size=32, shuffle=True)
test_loader = DataLoader(TensorDataset(test_images, test_labels), batch_size=64)

model = nn.Sequential(
    nn.Conv2d(1, 32, kernel_size=3, padding=1),
    nn.ReLU(),
    nn.Conv2d(32, 64, kernel_size=3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Dropout(0.25),
    nn.Linear(64 * 4 * 4, 10),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)

for epoch in range(1, 13):
    model.train()
    for images, labels in train_loader:
        loss = nn.functional.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    model.eval()
    correct = total = 0
    for images, labels in test_loader:
        with torch.no_grad():
            predictions = model(images).argmax(dim=1)
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        correct += (predictions == labels).sum().item()
        total += len(labels)
    accelerator.print(f"epoch {epoch}: {correct} of {total} test images are right, {correct / total:.2%}")
